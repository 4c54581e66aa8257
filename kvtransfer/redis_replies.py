"""Replies of a Redis server read from its socket, values straight into the buffers where they belong.

redis-py copies a value four times before it is where we want it, with the GIL held: 100 ms of one core for
92 MB. This takes 22 ms, verifying included, since the kernel's copy is the only one. Of RESP (2 and 3) it
reads what GETEX answers: a bulk string, null, or an error.
"""

from __future__ import annotations

import socket
from dataclasses import dataclass

_LINE_NBYTES = 256
"""Read at once where a line is expected; what follows it belongs to the value. No line may be longer."""

_SKIP_NBYTES = 2**16


class NotRedis(OSError):
    """The peer ended the connection, or says what Redis does not."""


@dataclass(frozen=True, slots=True)
class Refusal:
    """An error that the server replied."""

    message: str


class Replies:
    """Methods raise OSError: NotRedis, or TimeoutError after the time of silence that `connection` allows."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._ahead = memoryview(bytearray(_LINE_NBYTES))
        self._first = self._end = 0

    def next(self) -> int | Refusal | None:
        """Bytes of the next value, which `fill` and `skip` read and `end` ends; None where there is none."""
        line = self._line()
        kind, rest = line[:1], line[1:]
        if kind == b"$" and rest.isdigit():
            return int(rest)
        if line in (b"$-1", b"_"):
            return None
        if kind == b"-":
            return Refusal(rest.decode(errors="replace"))
        raise NotRedis(f"Redis does not answer GETEX with {line[:16]!r}")

    def fill(self, buffer: memoryview) -> None:
        """With the next bytes of the value."""
        done = min(len(buffer), self._end - self._first)
        buffer[:done] = self._ahead[self._first : self._first + done]
        self._first += done
        while done < len(buffer):
            done += self._receive(buffer[done:])

    def skip(self, nbytes: int) -> None:
        """The next bytes of the value."""
        unwanted = memoryview(bytearray(min(nbytes, _SKIP_NBYTES)))
        for left in range(nbytes, 0, -_SKIP_NBYTES):
            self.fill(unwanted[:left])

    def end(self) -> None:
        if self._line():
            raise NotRedis("a value is longer than was said")

    def _line(self) -> bytes:
        """Without its end."""
        while (at := self._ahead[self._first : self._end].tobytes().find(b"\r\n")) < 0:
            rest = self._ahead[self._first : self._end].tobytes()
            self._ahead[: len(rest)] = rest
            self._first, self._end = 0, len(rest)
            if self._end == _LINE_NBYTES:
                raise NotRedis("a line of a reply does not end")
            self._end += self._receive(self._ahead[self._end :])
        line = self._ahead[self._first : self._first + at].tobytes()
        self._first += at + 2
        return line

    def _receive(self, buffer: memoryview) -> int:
        if nbytes := self._connection.recv_into(buffer):
            return nbytes
        raise NotRedis("the server closed the connection")
