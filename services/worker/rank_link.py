"""What rank 0 of a tensor-parallel worker and each other rank say to each other, over a Unix socket.

    rank 0                                         rank r
    start {order}                  ----->          loads its part of the model
                                   <-----          ready, or failed {sentence}
    join                           ----->          both enter the group
    pool {blocks} + descriptor     ----->          maps its part of the KV pool
    pool {blocks}                  ----->          or, on a GPU, allocates it
                                   <-----          shared {how to map it}
    run {batch}, copy {src, dst}   ----->          does it; no answer but in the group
    end of the stream              ----->          ends

A frame: its length, its kind, the body. Without torch.
"""

from __future__ import annotations

import socket
import struct
import time
from contextlib import suppress
from enum import IntEnum
from typing import NamedTuple

from pydantic import BaseModel, ConfigDict

from core.errors import WorkerLost
from core.kv import KVLayout
from core.settings import Settings

_HEAD = struct.Struct("<IB")
_MIN_WAIT_S = 0.001  # a socket takes zero for "do not wait"
COPY = struct.Struct("<II")
"""Body of a copy: source and destination block."""
POOL = struct.Struct("<I")
"""Body of a pool: number of blocks; in host memory the descriptor of their region comes along."""


def silence_limit_s(settings: Settings, device_type: str) -> float:
    """How long ranks wait for each other. On GPUs as long as a start may take: NCCL's watchdog has one limit
    for all, and ranks compile kernels in their first steps."""
    limits = (settings.step_timeout_s, settings.start_timeout_s)
    return max(limits) if device_type == "cuda" else settings.step_timeout_s


class Kind(IntEnum):
    START = 1
    READY = 2
    FAILED = 3
    JOIN = 4
    POOL = 5
    RUN = 6
    COPY = 7
    SHARED = 8


class Order(BaseModel):
    """What a rank needs to know to load its part. `kv_layout`: the whole model's; `port`: of the meeting."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    rank: int
    settings: Settings
    dtype: str
    kv_layout: KVLayout
    max_model_len: int
    port: int


class Frame(NamedTuple):
    """`fd`: a descriptor that came along, the receiver's to close."""

    kind: Kind
    body: bytearray
    fd: int | None


class Link:
    """One end. Closing it, or the end of the process that holds it, ends the other side's `receive`."""

    def __init__(self, connection: socket.socket, timeout_s: float | None = None) -> None:
        """`timeout_s`: how long a frame may take to be sent; without it as long as the other end lives."""
        self._socket, self._timeout_s = connection, timeout_s

    def send(self, kind: Kind, body: bytes = b"", fd: int | None = None) -> None:
        """Raises WorkerLost when the other end is gone or takes nothing."""
        try:
            self._socket.settimeout(self._timeout_s)
            head = _HEAD.pack(len(body), kind)
            if fd is not None:
                socket.send_fds(self._socket, [head], [fd])
                head = b""
            self._socket.sendall(head + body)
        except OSError as error:
            raise WorkerLost(f"a tensor-parallel rank of this worker is gone ({error}); try again") from None

    def receive(self, timeout_s: float | None = None) -> Frame | None:
        """The next frame; None at the end of the stream. Raises WorkerLost when none comes within
        `timeout_s`, or half of one."""
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        try:
            self._socket.settimeout(timeout_s)
            first, fds, _, _ = socket.recv_fds(self._socket, _HEAD.size, 1)
            if not first:
                return None
            nbytes, kind = _HEAD.unpack(self._filled(bytearray(first), _HEAD.size, deadline))
            return Frame(Kind(kind), self._filled(bytearray(), nbytes, deadline), fds[0] if fds else None)
        except ConnectionResetError:  # it ended before it read all that we sent
            return None
        except OSError as error:
            raise WorkerLost(f"a rank's socket broke or stayed silent ({error}); try again") from None

    def close(self) -> None:
        """Idempotent."""
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()

    def _filled(self, buffer: bytearray, nbytes: int, deadline: float | None) -> bytearray:
        while len(buffer) < nbytes:
            if deadline is not None:
                self._socket.settimeout(max(deadline - time.monotonic(), _MIN_WAIT_S))
            part = self._socket.recv(nbytes - len(buffer))
            if not part:
                raise WorkerLost("a rank ended in the middle of a message; try again")
            buffer += part
        return buffer
