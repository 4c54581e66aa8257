"""What stands before every route: the key, the request id, the count of answers, the error envelope."""

from __future__ import annotations

import math
import uuid
from collections.abc import Iterable
from secrets import compare_digest
from typing import Any

import orjson
from starlette.exceptions import HTTPException

from core import log
from core.errors import BatonError, NotFound, Overloaded, RequestError, Unauthorized
from services.router.metrics import RouterMetrics
from services.router.parse import Receive
from services.router.sse import Send

MAX_REQUEST_ID_CHARS = 128
OPEN_PATHS = frozenset({"/health", "/ready"})
"""Probes have no key."""

CLIENT_GONE_STATUS = "499"

logger = log.get("router.gate")


class MethodNotAllowed(RequestError):
    http_status = 405
    code = "method_not_allowed"


async def send_error(send: Send, error: BatonError) -> None:
    """The OpenAI envelope with its status."""
    headers = [(b"content-type", b"application/json")]
    if isinstance(error, Overloaded):
        headers.append((b"retry-after", str(math.ceil(error.retry_after_s)).encode()))
    if isinstance(error, Unauthorized):
        headers.append((b"www-authenticate", b"Bearer"))
    body = orjson.dumps(error.envelope())
    headers.append((b"content-length", str(len(body)).encode()))
    await send({"type": "http.response.start", "status": error.http_status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


class Gate:
    """ASGI middleware around the whole application. `routes`: the templates that metrics may name."""

    def __init__(self, app: Any, metrics: RouterMetrics, api_key: str, routes: Iterable[str]) -> None:
        self._app = app
        self._metrics = metrics
        self._key = b"Bearer " + api_key.encode() if api_key else b""
        self._routes = frozenset(routes)

    async def __call__(self, scope: dict[str, Any], receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = dict(scope["headers"])
        request_id = _request_id(headers)
        scope["baton_request_id"] = request_id
        scope["app"] = self._app  # makes Starlette's routing raise its refusals instead of answering
        status = CLIENT_GONE_STATUS

        async def send_marked(message: Any) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = str(message["status"])
                message["headers"] = [*message.get("headers", ()), (b"x-request-id", request_id.encode())]
            await send(message)

        try:
            self._authorize(scope["path"], headers)
            await self._app(scope, receive, send_marked)
        except BatonError as error:
            await send_error(send_marked, error)
        except HTTPException as error:
            await send_error(send_marked, _refusal(error))
        except Exception:
            logger.exception("request.bug", route=self._route(scope["path"]))
            if status != CLIENT_GONE_STATUS:
                raise
            await send_error(send_marked, BatonError("the router failed; its log says why"))
        finally:
            self._metrics.requests.labels(self._route(scope["path"]), status).inc()

    def _authorize(self, path: str, headers: dict[bytes, bytes]) -> None:
        if not self._key or path in OPEN_PATHS:
            return
        if not compare_digest(headers.get(b"authorization", b""), self._key):
            raise Unauthorized("the API key is missing or wrong; send it as Authorization: Bearer KEY")

    def _route(self, path: str) -> str:
        if path in self._routes:
            return path
        parent = path.rpartition("/")[0]
        return next((route for route in self._routes if "{" in route and _parent(route) == parent), "other")


def _refusal(error: HTTPException) -> BatonError:
    """Starlette's own: no such route, or not with this method."""
    if error.status_code == 405:
        return MethodNotAllowed("this route does not take that method")
    return NotFound("there is no such route here; the API begins at /v1/models")


def _parent(route: str) -> str:
    return route.rpartition("/")[0]


def _request_id(headers: dict[bytes, bytes]) -> str:
    """The client's, capped, if it is printable; else a new one."""
    theirs = headers.get(b"x-request-id", b"").decode("latin-1")[:MAX_REQUEST_ID_CHARS]
    if theirs and theirs.isascii() and theirs.isprintable():
        return theirs
    return f"req-{uuid.uuid4().hex}"
