"""The routes that generate nothing: models, tokens, health, metrics.

Docstrings of the handlers are their descriptions in the OpenAPI document.
"""

from __future__ import annotations

from typing import Any

import orjson
from fastapi import Request, Response

from core.errors import ModelNotFound
from services.router.cluster import describe
from services.router.parse import check_token_ids, parse, read_body
from services.router.router import Router
from services.router.schemas import DetokenizeBody, TokenizeBody
from services.version import VERSION

METRICS_TYPE = "text/plain; version=1.0.0; charset=utf-8"


def _json(value: Any, status: int = 200) -> Response:
    return Response(orjson.dumps(value), status, media_type="application/json")


class SmallRoutes:
    """Handlers of one router. All raise BatonError for what the gate answers with an envelope."""

    def __init__(self, router: Router) -> None:
        self._router = router

    async def models(self) -> Response:
        """The served model, as a list of one."""
        text, _fleet = self._router.serving()
        return _json({"object": "list", "data": [self._describe_model(text.name)]})

    async def model(self, id: str) -> Response:
        """The served model."""
        text, _fleet = self._router.serving()
        if id != text.name:
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
        """The token ids of a prompt, or of messages as the chat template renders them."""
        text, _fleet = self._router.serving()
        body = parse(await self._body(request), TokenizeBody)
        self._router.check_model(body.model)
        tokens = await text.tokenize(body)
        return _json({"count": len(tokens), "max_model_len": self._router.max_model_len(), "tokens": tokens})

    async def detokenize(self, request: Request) -> Response:
        """The text of token ids, control tokens included."""
        text, _fleet = self._router.serving()
        body = parse(await self._body(request), DetokenizeBody)
        self._router.check_model(body.model)
        check_token_ids(body.tokens, text.vocab_size, "tokens")
        return _json({"prompt": text.tokenizer.decode(body.tokens, skip_special=False)})

    async def _body(self, request: Request) -> bytes:
        return await read_body(request.scope, request.receive, self._router.settings.max_body_bytes)

    async def health(self) -> Response:
        """200 while the process lives. Needs no key."""
        return _json({"status": "alive"})

    async def ready(self) -> Response:
        """200 when a request could be answered now, else 503; both say what is wrong with anything.
        Needs no key."""
        ready, problems = self._router.readiness()
        fleet = self._router.fleet
        workers = [
            {"id": member.worker_id, "role": member.role, "state": state.value}
            for member, state, _reason in (fleet.workers() if fleet else ())
        ]
        return _json({"ready": ready, "problems": problems, "workers": workers}, 200 if ready else 503)

    async def version(self) -> Response:
        """Baton's version."""
        return _json({"version": VERSION})

    async def metrics(self) -> Response:
        """Metrics in the Prometheus text format."""
        return Response(self._router.metrics.exposition(), headers={"content-type": METRICS_TYPE})

    async def cluster(self) -> Response:
        """Every worker with its state, addresses, fingerprint and load."""
        text, fleet = self._router.serving()
        return _json({"model": text.name, "workers": [describe(*worker) for worker in fleet.workers()]})
