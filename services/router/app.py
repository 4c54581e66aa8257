"""The routes. Generation is `endpoint`'s; here are the small ones and how all are put together."""

from __future__ import annotations

from typing import Any

import orjson
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.routing import Router as Routing

from core.errors import ModelNotFound
from services.router.cluster import describe
from services.router.endpoint import GenerationEndpoint
from services.router.gate import Gate
from services.router.parse import check_token_ids, parse, read_body
from services.router.router import Router
from services.router.schemas import ChatBody, CompletionBody, DetokenizeBody, TokenizeBody
from services.router.shapes import ChatShape, CompletionShape
from services.version import VERSION

METRICS_TYPE = "text/plain; version=1.0.0; charset=utf-8"


def create_app(router: Router) -> Gate:
    """The whole application (ASGI) of one router."""
    small = _SmallRoutes(router)
    routes = [
        Route(
            "/v1/completions", GenerationEndpoint(router, CompletionBody, CompletionShape), methods=["POST"]
        ),
        Route("/v1/chat/completions", GenerationEndpoint(router, ChatBody, ChatShape), methods=["POST"]),
        Route("/v1/models", small.models),
        Route("/v1/models/{id:path}", small.model),
        Route("/v1/cluster", small.cluster),
        Route("/tokenize", small.tokenize, methods=["POST"]),
        Route("/detokenize", small.detokenize, methods=["POST"]),
        Route("/health", small.health),
        Route("/ready", small.ready),
        Route("/version", small.version),
        Route("/metrics", small.metrics),
    ]
    return Gate(
        Routing(routes, redirect_slashes=False),
        router.metrics,
        router.settings.api_key,
        [route.path_format for route in routes],
    )


def _json(value: Any, status: int = 200) -> Response:
    return Response(orjson.dumps(value), status, media_type="application/json")


class _SmallRoutes:
    def __init__(self, router: Router) -> None:
        self._router = router

    async def models(self, _: Request) -> Response:
        text, _fleet = self._router.serving()
        return _json({"object": "list", "data": [self._describe_model(text.name)]})

    async def model(self, request: Request) -> Response:
        text, _fleet = self._router.serving()
        if request.path_params["id"] != text.name:
            raise ModelNotFound(
                f"that model is not served here; this server has `{text.name}`", param="model"
            )
        return _json(self._describe_model(text.name))

    def _describe_model(self, name: str) -> dict[str, Any]:
        return {
            "id": name,
            "object": "model",
            "created": self._router.created,
            "owned_by": "baton",
            "max_model_len": self._router.max_model_len(),
        }

    async def tokenize(self, request: Request) -> Response:
        text, _fleet = self._router.serving()
        body = parse(await self._body(request), TokenizeBody)
        self._router.check_model(body.model)
        tokens = await text.tokenize(body)
        return _json({"count": len(tokens), "max_model_len": self._router.max_model_len(), "tokens": tokens})

    async def detokenize(self, request: Request) -> Response:
        text, _fleet = self._router.serving()
        body = parse(await self._body(request), DetokenizeBody)
        self._router.check_model(body.model)
        check_token_ids(body.tokens, text.vocab_size, "tokens")
        return _json({"prompt": text.tokenizer.decode(body.tokens, skip_special=False)})

    async def _body(self, request: Request) -> bytes:
        return await read_body(request.receive, self._router.settings.max_body_bytes)

    async def health(self, _: Request) -> Response:
        return _json({"status": "alive"})

    async def ready(self, _: Request) -> Response:
        ready, problems = self._router.readiness()
        fleet = self._router.fleet
        workers = [
            {"id": member.worker_id, "role": member.role, "state": state.value}
            for member, state, _reason in (fleet.workers() if fleet else ())
        ]
        return _json({"ready": ready, "problems": problems, "workers": workers}, 200 if ready else 503)

    async def version(self, _: Request) -> Response:
        return _json({"version": VERSION})

    async def metrics(self, _: Request) -> Response:
        return Response(self._router.metrics.exposition(), headers={"content-type": METRICS_TYPE})

    async def cluster(self, _: Request) -> Response:
        text, fleet = self._router.serving()
        return _json({"model": text.name, "workers": [describe(*worker) for worker in fleet.workers()]})
