"""One client's connection: how long and how late a request may be besides its body, and who it is under TLS.

The parser itself has no bound: it gathers headers and trailers for as long as they come.
"""

from __future__ import annotations

import asyncio
import ssl
from typing import Any, ClassVar

from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from core.errors import RequestError
from services.router.gate import OPEN_PATHS, send_error

REST_TIMEOUT_S = 30.0
"""For what a client still has to send while nothing is being answered: the head of its request, from the
connection's beginning or the first byte of a further one; the rest of a request that was answered early."""

_TOO_LARGE = b"HTTP/1.1 431 Request Header Fields Too Large\r\ncontent-length: 0\r\nconnection: close\r\n\r\n"


class HeadTooLarge(RequestError):
    http_status = 431
    code = "headers_too_large"


class CertificateRequired(RequestError):
    http_status = 403
    error_type = "authentication_error"
    code = "client_certificate_required"


class Connection(HttpToolsProtocol):
    """HTTP/1.1 with bounds on heads and trailers. See `bounded`."""

    max_head_nbytes: ClassVar[int]

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        secured = transport.get_extra_info("ssl_object")
        self._extensions = {} if secured is None else {"tls": {"client_cert_name": _subject(secured)}}
        self._timer: asyncio.TimerHandle | None = None
        self._in_head = self._begun = True
        self._nbytes = 0  # in a row that are no body, as far as a count by packets can tell
        self._retime()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timer()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        self._begun = True
        self._nbytes += len(data)
        super().data_received(data)
        if self._nbytes > self.max_head_nbytes and not self.transport.is_closing():
            if self._in_head and not self._answering:
                self.transport.write(_TOO_LARGE)
            self.transport.close()
        self._retime()

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._begun = True
        self.scope["extensions"] = self._extensions  # type: ignore[typeddict-unknown-key]

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._in_head:  # else it is a trailer, which must not pass for a header
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self._in_head, self._nbytes = False, 0
        fields = sum(len(name) + len(value) + 4 for name, value in self.headers)
        usual = self.app
        if len(self.url) + fields > self.max_head_nbytes:
            self.app = self._refuse_head
        try:
            super().on_headers_complete()
        finally:
            self.app = usual

    def on_body(self, body: bytes) -> None:
        self._nbytes = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        super().on_message_complete()
        self._in_head, self._begun, self._nbytes = True, False, 0

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._retime()

    async def _refuse_head(self, scope: Any, receive: Any, send: Any) -> None:
        most = self.max_head_nbytes
        error = HeadTooLarge(f"request line and headers have more than {most} bytes; send fewer")
        await send_error(send, error)

    @property
    def _answering(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    def _retime(self) -> None:
        if not self._begun or self._answering:
            self._stop_timer()
        elif self._timer is None:
            self._timer = self.loop.call_later(REST_TIMEOUT_S, self.transport.close)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


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
