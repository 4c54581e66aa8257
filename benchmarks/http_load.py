"""A client that costs little: HTTP/1.1 on kept connections, and when each part of an answer came."""

from __future__ import annotations

import asyncio
import re
import time
from dataclasses import dataclass, field
from typing import cast

import orjson

_ID = re.compile(rb'"id":"(?:chat)?cmpl-([0-9a-f]+)"')
_LENGTH = re.compile(rb"content-length: *(\d+)", re.IGNORECASE)
_HEADERS_END, _STREAM_END, _CHUNKED_END = b"\r\n\r\n", b"data: [DONE]\n\n", b"0\r\n\r\n"


@dataclass(slots=True)
class Answer:
    """`at`: when data came, in `time.perf_counter()`, and how often the mark was in it. `id`: the router's,
    empty where the answer has none."""

    asked_at: float
    status: int = 0
    id: str = ""
    body: bytes = b""
    ended_at: float = 0.0
    at: list[tuple[float, int]] = field(default_factory=list)


class Client(asyncio.Protocol):
    """One connection, one request at a time. `mark`: what stands in a stream once for each token. `begun`: of
    the present answer a mark has come, or its end."""

    def __init__(self, mark: bytes) -> None:
        self._mark = mark
        self.begun = asyncio.Event()
        self._transport: asyncio.Transport | None = None
        self._answer = Answer(0.0)
        self._done: asyncio.Future[Answer] | None = None
        self._head = b""
        self._missing: int | None = None  # bytes of a body with a length

    @classmethod
    async def connect(cls, host: str, port: int, mark: bytes = b"data: {") -> Client:
        _, client = await asyncio.get_running_loop().create_connection(lambda: cls(mark), host, port)
        return client

    @property
    def num_marks(self) -> int:
        """Of the present answer so far."""
        return sum(count for _, count in self._answer.at)

    async def get(self, path: str) -> Answer:
        return await self._send(f"GET {path} HTTP/1.1\r\nhost: b\r\n\r\n".encode())

    async def post(self, path: str, body: object) -> Answer:
        data = body if isinstance(body, bytes) else orjson.dumps(body)
        head = f"POST {path} HTTP/1.1\r\nhost: b\r\ncontent-length: {len(data)}\r\n\r\n"
        return await self._send(head.encode() + data)

    async def _send(self, request: bytes) -> Answer:
        assert self._transport is not None
        self._head, self._missing = b"", None
        self.begun.clear()
        self._done = asyncio.get_running_loop().create_future()
        self._answer = Answer(time.perf_counter())
        self._transport.write(request)
        return await self._done

    def close(self) -> None:
        if self._transport is not None:
            self._transport.close()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is not of that class

    def connection_lost(self, exc: Exception | None) -> None:
        if self._done is not None and not self._done.done():
            self._done.set_exception(ConnectionError("the router closed the connection"))

    def data_received(self, data: bytes) -> None:
        now = time.perf_counter()
        if not self._answer.status:
            self._head += data
            head, found, data = self._head.partition(_HEADERS_END)
            if not found:
                return
            self._answer.status = int(head[9:12])
            length = _LENGTH.search(head)
            self._missing = int(length[1]) if length else None
        self._take(data, now)

    def _take(self, data: bytes, now: float) -> None:
        answer = self._answer
        if not answer.id and (found := _ID.search(data)):
            answer.id = found[1].decode()
        if count := data.count(self._mark):
            answer.at.append((now, count))
            self.begun.set()
        if self._missing is None:
            ended = data.endswith(_CHUNKED_END)
        else:
            answer.body += data
            self._missing -= len(data)
            ended = self._missing <= 0
        if ended and self._done is not None and not self._done.done():
            answer.ended_at = now
            self.begun.set()
            self._done.set_result(answer)
