"""What stands before every route: the key, the request id, the count of answers, the error envelope.

FastAPI's own refusals are translated by `refuse`; every error leaves through `send_error`.
"""

from __future__ import annotations

import asyncio
import math
import uuid
from collections.abc import Awaitable, Callable, Iterable, Mapping, MutableMapping
from typing import Any, NoReturn

import orjson
from starlette.exceptions import HTTPException
from starlette.requests import Request

from core.errors import BatonError, NotFound, RequestError, Unauthorized
from services.router.bugs import reported
from services.router.headers import header
from services.router.keys import ApiKey
from services.router.metrics import RouterMetrics
from services.router.parse import Receive
from services.router.record import CLIENT_CLOSED_REQUEST
from services.router.shutdown import cut_off
from services.router.sse import Send

MAX_REQUEST_ID_CHARS = 128
OPEN_PATHS = frozenset({"/startup", "/live", "/health", "/ready"})
"""Probes have no key."""


class MethodNotAllowed(RequestError):
    http_status = 405
    code = "method_not_allowed"

    def __init__(self, allow: str) -> None:
        super().__init__(f"this route does not take that method; it takes {allow}")
        self.allow = allow


async def refuse(request: Request, error: Exception) -> NoReturn:
    """FastAPI's handler of its own errors: no such route, or not with this method."""
    if isinstance(error, HTTPException) and error.status_code == 405:
        methods = (error.headers or {}).get("Allow", "")
        raise MethodNotAllowed("GET, HEAD" if methods == "GET" else methods)
    raise NotFound("there is no such route here; the API begins at /v1/models")


async def send_error(send: Send, error: BatonError) -> None:
    """The OpenAI envelope with its status."""
    headers = [(b"content-type", b"application/json")]
    if error.retry_after_s is not None:
        headers.append((b"retry-after", str(math.ceil(error.retry_after_s)).encode()))
        headers.append((b"retry-after-ms", str(math.ceil(error.retry_after_s * 1000)).encode()))
    if isinstance(error, Unauthorized):
        headers.append((b"www-authenticate", b"Bearer"))
    if isinstance(error, MethodNotAllowed):
        headers.append((b"allow", error.allow.encode()))
    body = orjson.dumps(error.envelope())
    headers.append((b"content-length", str(len(body)).encode()))
    await send({"type": "http.response.start", "status": error.http_status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


class Gate:
    """ASGI middleware around the whole application.

    `authorize`: the key that an `Authorization` header holds, then in `scope["baton_key"]`; raises what is
    answered instead.
    `routes`: the templates that metrics may name. While `leaving`, connections end with their answer.
    """

    def __init__(
        self,
        app: Any,
        metrics: RouterMetrics,
        leaving: Callable[[], bool],
        authorize: Callable[[str], ApiKey],
        routes: Iterable[str],
    ) -> None:
        self._app = app
        self._leaving = leaving
        self._metrics = metrics
        self._authorize = authorize
        self._routes = frozenset(routes)
        self._prefixes = {route.partition("{")[0]: route for route in self._routes if "{" in route}

    async def __call__(self, scope: MutableMapping[str, Any], receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        if scope["method"] == "HEAD":
            scope = {**scope, "method": "GET"}  # the server, which has the original, sends no body
        request_id = _request_id(scope)
        scope["baton_request_id"] = request_id
        status = CLIENT_CLOSED_REQUEST

        def send_marked(message: Any) -> Awaitable[None]:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [*message.get("headers", ()), (b"x-request-id", request_id.encode())]
                if self._leaving():
                    message["headers"].append((b"connection", b"close"))
            return send(message)

        try:
            if scope["path"] not in OPEN_PATHS:
                scope["baton_key"] = self._authorize(header(scope, "Authorization") or "")
            await self._app(scope, receive, send_marked)
        except BatonError as error:
            await send_error(send_marked, error)
        except asyncio.CancelledError:
            if status == CLIENT_CLOSED_REQUEST:
                await send_error(send_marked, cut_off())
        except Exception as error:
            bug = reported(error)
            if status == CLIENT_CLOSED_REQUEST:
                await send_error(send_marked, bug)
        finally:
            self._metrics.requests.labels(self._route(scope["path"]), str(status)).inc()

    def _route(self, path: str) -> str:
        if path in self._routes:
            return path
        return next((r for prefix, r in self._prefixes.items() if path.startswith(prefix)), "other")


def _request_id(scope: Mapping[str, Any]) -> str:
    """The client's, capped, if it is printable; else a new one."""
    theirs = (header(scope, "X-Request-Id") or "")[:MAX_REQUEST_ID_CHARS]
    if theirs and theirs.isascii() and theirs.isprintable():
        return theirs
    return f"req-{uuid.uuid4().hex}"
