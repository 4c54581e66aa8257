"""How the routes are put together.

FastAPI routes and documents. It parses no body and writes no answer: handlers take the bytes and
return a Response, so that every error is our envelope and events go straight to ASGI.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from fastapi import FastAPI, Response
from starlette.exceptions import HTTPException
from starlette.responses import PlainTextResponse
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from services.router import openapi
from services.router.endpoint import GenerationEndpoint
from services.router.gate import Gate, refuse
from services.router.router import Router
from services.router.schemas import ChatBody, CompletionBody, DetokenizeBody, TokenizeBody
from services.router.shapes import ChatShape, CompletionShape
from services.router.small_routes import SmallRoutes
from services.version import VERSION


def create_app(router: Router) -> FastAPI:
    """The whole application (ASGI) of one router."""
    app = openapi.DocumentedAPI(
        title="Baton",
        version=VERSION,
        docs_url=None,  # the pages of these two load scripts from elsewhere
        redoc_url=None,
        redirect_slashes=False,
        exception_handlers={HTTPException: refuse},
        responses=openapi.ERRORS,
    )
    _add_generation(app, router)
    _add_small(app, SmallRoutes(router))
    app.add_middleware(
        Gate,
        metrics=router.metrics,
        api_key=router.settings.api_key,
        routes=[route.path_format for route in app.routes if isinstance(route, Route)],
    )
    return app


def _add_generation(app: FastAPI, router: Router) -> None:
    completions = GenerationEndpoint(router, CompletionBody, CompletionShape)
    chat = GenerationEndpoint(router, ChatBody, ChatShape)
    for path, body, endpoint in (
        ("/v1/completions", CompletionBody, completions),
        ("/v1/chat/completions", ChatBody, chat),
    ):
        app.add_api_route(
            path,
            _written_by(endpoint),
            methods=["POST"],
            name=path.removeprefix("/v1/").replace("/", "_"),
            description="OpenAI's API, with what `docs/api.md` lists beside it.",
            responses=openapi.GENERATED,
            openapi_extra=openapi.generates(body),
        )


def _add_small(app: FastAPI, small: SmallRoutes) -> None:
    app.add_api_route("/v1/models", small.models)
    app.add_api_route("/v1/models/{id:path}", small.model)
    app.add_api_route("/v1/cluster", small.cluster)
    app.add_api_route(
        "/tokenize", small.tokenize, methods=["POST"], openapi_extra=openapi.takes(TokenizeBody)
    )
    app.add_api_route(
        "/detokenize", small.detokenize, methods=["POST"], openapi_extra=openapi.takes(DetokenizeBody)
    )
    app.add_api_route("/health", small.health)
    app.add_api_route("/ready", small.ready, responses=openapi.NOT_READY)
    app.add_api_route("/version", small.version)
    app.add_api_route("/metrics", small.metrics, response_class=PlainTextResponse)


class _Written(Response):
    """An answer that an ASGI application writes."""

    def __init__(self, write: ASGIApp) -> None:
        super().__init__()
        self._write = write

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._write(scope, receive, send)


def _written_by(write: ASGIApp) -> Callable[[], Awaitable[Response]]:
    async def handler() -> Response:
        return _Written(write)

    return handler
