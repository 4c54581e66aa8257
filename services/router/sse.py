"""One HTTP answer, written straight to ASGI: whole as JSON, or as server-sent events."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, MutableMapping
from typing import Any

import orjson

from core.errors import BatonError

LAST_WORDS_S = 1.0
"""How long an error event may wait for a client that reads slowly."""

Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
Headers = Iterable[tuple[str, str]]


def event(value: Any) -> bytes:
    """One `data:` event."""
    return b"data: " + orjson.dumps(value) + b"\n\n"


class Reply:
    """Write either `json`, or `open`, `events` ... and `done` or `fail`. `started`: headers are out."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self.started = False

    async def json(self, value: Any, headers: Headers) -> None:
        body = orjson.dumps(value)
        await self._start(
            [("content-type", "application/json"), ("content-length", str(len(body))), *headers]
        )
        await self._body(body, more=False)

    async def open(self, headers: Headers) -> None:
        """Send the headers of a stream; nothing may buffer it on the way."""
        await self._start(
            [
                ("content-type", "text/event-stream; charset=utf-8"),
                ("cache-control", "no-cache"),
                ("x-accel-buffering", "no"),
                *headers,
            ]
        )

    async def events(self, data: bytes) -> None:
        """Send events, as `event` makes them, in one write; nothing for nothing."""
        if data:
            await self._send({"type": "http.response.body", "body": data, "more_body": True})

    async def done(self) -> None:
        await self._body(b"data: [DONE]\n\n", more=False)

    async def fail(self, error: BatonError) -> None:
        """The stream breaks: one error event, then the end, without [DONE]."""
        try:
            async with asyncio.timeout(LAST_WORDS_S):
                await self._body(event(error.envelope()), more=False)
        except TimeoutError:
            return  # the client does not read; the server closes the connection with the request

    async def _start(self, headers: Headers) -> None:
        self.started = True
        raw = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in headers]
        await self._send({"type": "http.response.start", "status": 200, "headers": raw})

    async def _body(self, data: bytes, *, more: bool) -> None:
        await self._send({"type": "http.response.body", "body": data, "more_body": more})
