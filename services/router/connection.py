"""One client's connection: how long and how late the head of a request may be, and who it is under TLS.

The parser itself has no bound: it gathers headers for as long as they come.
"""

from __future__ import annotations

import asyncio
import ssl
from typing import Any, ClassVar

from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from core.errors import RequestError
from services.router.gate import OPEN_PATHS, send_error

HEAD_TIMEOUT_S = 30.0
"""From a connection's beginning, or the first byte of a further request, to the end of the request's head."""

_TOO_LARGE = b"HTTP/1.1 431 Request Header Fields Too Large\r\ncontent-length: 0\r\nconnection: close\r\n\r\n"


class HeadTooLarge(RequestError):
    http_status = 431
    code = "headers_too_large"


class CertificateRequired(RequestError):
    http_status = 403
    error_type = "authentication_error"
    code = "client_certificate_required"


class Connection(HttpToolsProtocol):
    """HTTP/1.1 with bounds on the head. See `bounded`."""

    max_head_nbytes: ClassVar[int]

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        secured = transport.get_extra_info("ssl_object")
        self._extensions = {} if secured is None else {"tls": {"client_cert_name": _subject(secured)}}
        self._head_timer: asyncio.TimerHandle | None = None
        self._begin_head()
        self._time_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self._end_head()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._in_head:
            self._head_nbytes += len(data)
            self._time_head()
        super().data_received(data)
        if self._in_head and self._head_nbytes > self.max_head_nbytes:
            self.transport.write(_TOO_LARGE)
            self.transport.close()

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self.scope["extensions"] = self._extensions  # type: ignore[typeddict-unknown-key]

    def on_headers_complete(self) -> None:
        self._end_head()
        fields = sum(len(name) + len(value) + 4 for name, value in self.headers)
        usual = self.app
        if len(self.url) + fields > self.max_head_nbytes:
            self.app = self._refuse_head
        try:
            super().on_headers_complete()
        finally:
            self.app = usual

    def on_message_complete(self) -> None:
        super().on_message_complete()
        self._begin_head()

    async def _refuse_head(self, scope: Any, receive: Any, send: Any) -> None:
        most = self.max_head_nbytes
        error = HeadTooLarge(f"request line and headers have more than {most} bytes; send fewer")
        await send_error(send, error)

    def _begin_head(self) -> None:
        self._in_head, self._head_nbytes = True, 0

    def _time_head(self) -> None:
        if self._head_timer is None:
            self._head_timer = self.loop.call_later(HEAD_TIMEOUT_S, self.transport.close)

    def _end_head(self) -> None:
        self._in_head = False
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None


def bounded(max_head_nbytes: int) -> type[Connection]:
    """The protocol class with this bound, for uvicorn's `http`."""
    return type("Connection", (Connection,), {"max_head_nbytes": max_head_nbytes})


class RequireCertificate:
    """ASGI middleware: without a client certificate only probes are answered. That it is of the right CA, the
    handshake has seen."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"] not in OPEN_PATHS:
            shown = scope.get("extensions", {}).get("tls", {}).get("client_cert_name")
            if shown is None:
                error = CertificateRequired("this server asks for a client certificate; connect with one")
                await send_error(send, error)
                return
        await self._app(scope, receive, send)


def _subject(secured: ssl.SSLObject) -> str | None:
    """The client's verified name as in its certificate, which may be empty; None without a certificate."""
    certificate = secured.getpeercert()
    if not certificate:
        return None
    return ",".join(f"{key}={value}" for part in certificate.get("subject", ()) for key, value in part)
