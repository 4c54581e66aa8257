"""The routes that generate nothing: models, tokens, health, metrics.

Docstrings of the handlers are their descriptions in the OpenAPI document.
"""

from __future__ import annotations

import re
from typing import Any

import orjson
from fastapi import Request, Response

from core.errors import InvalidParameter, ModelNotFound, NotFound
from services.router.cluster import describe
from services.router.keys import ApiKey
from services.router.parse import read_body
from services.router.records import DEFAULT_LISTED, MAX_LISTED
from services.router.router import MAX_SHOWN, Router
from services.router.schemas import DetokenizeBody, TokenizeBody
from services.version import VERSION

METRICS_TYPE = "text/plain; version=1.0.0; charset=utf-8"


def _whose(request: Request) -> str | None:
    """Whose requests are shown: those of the API key, None = everybody's, to an admin key."""
    key: ApiKey = request.scope["baton_key"]
    return None if key.admin else key.name


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
        body = await text.read(await self._body(request), TokenizeBody)
        self._router.check_model(body.model)
        tokens = await text.tokenize(body)
        return _json({"count": len(tokens), "max_model_len": self._router.max_model_len(), "tokens": tokens})

    async def detokenize(self, request: Request) -> Response:
        """The text of token ids, control tokens included."""
        text, _fleet = self._router.serving()
        body = await text.read(await self._body(request), DetokenizeBody)
        self._router.check_model(body.model)
        return _json({"prompt": await text.detokenize(body)})

    async def _body(self, request: Request) -> bytes:
        return await read_body(request.scope, request.receive, self._router.settings.max_body_bytes)

    async def health(self) -> Response:
        """200 while the process lives: this loop turns. Needs no key."""
        return _json({"status": "draining" if self._router.leaving else "alive"})

    async def startup(self) -> Response:
        """200 once the model's tokenizer is loaded, before that 503. Needs no key."""
        loaded = self._router.text is not None
        return _json({"status": "started" if loaded else "loading"}, 200 if loaded else 503)

    async def ready(self) -> Response:
        """200 when a request could be answered now, else 503; both say what is wrong with anything.
        Of many workers it shows a hundred, first those that are not ready. Needs no key."""
        ready, problems = self._router.readiness()
        fleet = self._router.fleet
        workers = [
            {"id": member.worker_id, "role": member.role, "state": state.value}
            for member, state, _reason in (fleet.some(MAX_SHOWN) if fleet else ())
        ]
        more = len(fleet.roster.members) - len(workers) if fleet else 0
        answer = {"ready": ready, "problems": problems, "workers": workers, "more_workers": more}
        return _json(answer, 200 if ready else 503)

    async def requests(self, request: Request) -> Response:
        """The newest requests, running ones first, without their prompts and answers. A key sees its own, an
        admin key everybody's."""
        limit = request.query_params.get("limit", str(DEFAULT_LISTED))
        if not re.fullmatch("[0-9]{1,4}", limit) or not 1 <= int(limit) <= MAX_LISTED:
            raise InvalidParameter(f"limit should be an integer from 1 to {MAX_LISTED}", param="limit")
        newest = self._router.records.newest(int(limit), _whose(request))
        return Response(newest, media_type="application/json")

    async def request_record(self, request: Request, id: str) -> Response:
        """One request by its id, the id of its answer or its `X-Request-Id`: what was planned for it and why,
        what every candidate was expected to take, and what it really took."""
        record = self._router.records.find(id, _whose(request))
        if record is None:
            raise NotFound(
                "this router remembers no such request of yours; it keeps the last ones only "
                "(--request-record-bytes) and forgets them when it restarts, /v1/requests lists them"
            )
        return Response(record, media_type="application/json")

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
