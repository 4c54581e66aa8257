"""How the routes are put together.

FastAPI routes and documents. It parses no body and writes no answer: handlers take the bytes and
return a Response, so that every error is our envelope and events go straight to ASGI.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from types import MappingProxyType

from fastapi import FastAPI, Response
from starlette.exceptions import HTTPException
from starlette.responses import PlainTextResponse
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from services.router import openapi
from services.router.admin_routes import AdminRoutes
from services.router.endpoint import GenerationEndpoint
from services.router.gate import Gate, refuse
from services.router.keys import ApiKey
from services.router.router import Router
from services.router.schemas import ChatBody, CompletionBody, DetokenizeBody, RoleBody, TokenizeBody
from services.router.shapes import ChatShape, CompletionShape
from services.router.small_routes import SmallRoutes
from services.version import VERSION


def create_app(router: Router) -> FastAPI:
    """The whole application (ASGI) of one router."""
    app, small = _empty("Baton"), SmallRoutes(router)
    posts = _add_generation(app, router)
    _add_small(app, small)
    _add_common(app, small)
    gate = _add_gate(app, router, lambda authorization: router.keys.user(authorization))
    app.posts = {path: gate(endpoint) for path, endpoint in posts.items()}
    return app


def create_admin_app(router: Router) -> FastAPI:
    """What the admin port serves: the routes that change something, and those that show how all fares."""
    app, admin = _empty("Baton's admin port"), AdminRoutes(router)
    app.add_api_route(
        "/v1/cluster/workers/{id}/role",
        admin.change_role,
        methods=["POST"],
        openapi_extra=openapi.takes(RoleBody),
        responses=openapi.BEGUN,
    )
    _add_common(app, SmallRoutes(router))
    _add_gate(app, router, lambda authorization: router.keys.admin(authorization))
    return app


def _empty(title: str) -> _App:
    return _App(
        title=title,
        version=VERSION,
        docs_url=None,  # the pages of these two load scripts from elsewhere
        redoc_url=None,
        redirect_slashes=False,
        exception_handlers={HTTPException: refuse},
        responses=openapi.ERRORS,
    )


def _add_gate(app: FastAPI, router: Router, authorize: Callable[[str], ApiKey]) -> Callable[[ASGIApp], Gate]:
    """Once all routes are added. Returns what puts the same gate before another application."""
    gate = partial(
        Gate,
        metrics=router.metrics,
        leaving=lambda: router.leaving,
        authorize=authorize,
        routes=[route.path_format for route in app.routes if isinstance(route, Route)],
    )
    app.add_middleware(gate)
    return gate


def _add_generation(app: FastAPI, router: Router) -> dict[str, ASGIApp]:
    """Document the endpoints; they are returned by path."""
    completions = GenerationEndpoint(router, CompletionBody, CompletionShape)
    chat = GenerationEndpoint(router, ChatBody, ChatShape)
    for path, body in (("/v1/completions", CompletionBody), ("/v1/chat/completions", ChatBody)):
        app.add_api_route(
            path,
            _post,
            methods=["POST"],
            name=path.removeprefix("/v1/").replace("/", "_"),
            description="OpenAI's API, with what `docs/api.md` lists beside it.",
            responses=openapi.GENERATED,
            openapi_extra=openapi.generates(body),
        )
    return {"/v1/completions": completions, "/v1/chat/completions": chat}


def _add_small(app: FastAPI, small: SmallRoutes) -> None:
    app.add_api_route("/v1/models", small.models)
    app.add_api_route("/v1/models/{id:path}", small.model)
    app.add_api_route(
        "/v1/requests", small.requests, responses=openapi.RECORDS, openapi_extra=openapi.LIMITED
    )
    app.add_api_route("/v1/requests/{id:path}", small.request_record, responses=openapi.RECORD)
    app.add_api_route(
        "/tokenize", small.tokenize, methods=["POST"], openapi_extra=openapi.takes(TokenizeBody)
    )
    app.add_api_route(
        "/detokenize", small.detokenize, methods=["POST"], openapi_extra=openapi.takes(DetokenizeBody)
    )


def _add_common(app: FastAPI, small: SmallRoutes) -> None:
    app.add_api_route("/v1/cluster", small.cluster)
    app.add_api_route("/startup", small.startup, responses=openapi.NOT_READY)
    app.add_api_route("/live", small.health, name="live")
    app.add_api_route("/health", small.health)
    app.add_api_route("/ready", small.ready, responses=openapi.NOT_READY)
    app.add_api_route("/version", small.version)
    app.add_api_route("/metrics", small.metrics, response_class=PlainTextResponse)


class _App(openapi.DocumentedAPI):
    """`posts`: applications by path that answer POST there at once. FastAPI, which documents them, would put
    nine calls between every event and the socket."""

    posts: Mapping[str, ASGIApp] = MappingProxyType({})

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        direct = scope["type"] == "http" and scope["method"] == "POST"
        write = self.posts.get(scope["path"]) if direct else None
        await (write or super().__call__)(scope, receive, send)


async def _post() -> Response:
    raise AssertionError("a POST goes to its endpoint without FastAPI")
