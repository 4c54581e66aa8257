"""What a server may say to GETEX, in pieces of any size."""

import socket
import threading
from collections.abc import Iterator

import pytest

from kvtransfer.redis_replies import NotRedis, Refusal, Replies

LONG = bytes(range(256)) * 4


@pytest.fixture
def pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.settimeout(5.0)
        yield ours, theirs


@pytest.mark.parametrize("piece", [1, 3, 7, 100, 5000])
def test_replies_in_a_row(pair: tuple[socket.socket, socket.socket], piece: int) -> None:
    ours, theirs = pair
    sent = (
        b"$5\r\nab\r\nc\r\n$-1\r\n_\r\n-OOM not now\r\n$1024\r\n%s\r\n$0\r\n\r\n$1024\r\n%s\r\n$2\r\nxy\r\n"
        % (
            LONG,
            LONG,
        )
    )

    def send() -> None:
        for at in range(0, len(sent), piece):
            theirs.sendall(sent[at : at + piece])

    thread = threading.Thread(target=send)
    thread.start()
    replies = Replies(ours)

    def value() -> bytes:
        nbytes = replies.next()
        assert isinstance(nbytes, int)
        buffer = bytearray(nbytes)
        replies.fill(memoryview(buffer)[:2])
        replies.fill(memoryview(buffer)[2:])
        replies.end()
        return bytes(buffer)

    assert value() == b"ab\r\nc"
    assert replies.next() is None
    assert replies.next() is None
    assert replies.next() == Refusal("OOM not now")
    assert value() == LONG
    assert value() == b""
    assert replies.next() == 1024
    replies.skip(1024)
    replies.end()
    assert value() == b"xy"
    thread.join(5)


@pytest.mark.parametrize(
    ("said", "why"),
    [
        (b"HTTP/1.1 400 Bad Request\r\n", "GETEX"),
        (b":12\r\n", "GETEX"),
        (b"$x\r\n", "GETEX"),
        (b"-" + b"x" * 300 + b"\r\n", "does not end"),
        (b"$5", "closed"),
    ],
)
def test_what_redis_does_not_say(pair: tuple[socket.socket, socket.socket], said: bytes, why: str) -> None:
    ours, theirs = pair
    theirs.sendall(said)
    theirs.shutdown(socket.SHUT_WR)
    with pytest.raises(NotRedis, match=why):
        Replies(ours).next()


def test_a_value_longer_than_was_said(pair: tuple[socket.socket, socket.socket]) -> None:
    ours, theirs = pair
    theirs.sendall(b"$2\r\nabc\r\n")
    replies = Replies(ours)
    assert replies.next() == 2
    replies.skip(2)
    with pytest.raises(NotRedis, match="longer"):
        replies.end()


def test_silence_is_bounded(pair: tuple[socket.socket, socket.socket]) -> None:
    ours, theirs = pair
    ours.settimeout(0.05)
    theirs.sendall(b"$5\r\nab")
    replies = Replies(ours)
    assert replies.next() == 5
    with pytest.raises(TimeoutError):
        replies.fill(memoryview(bytearray(5)))
