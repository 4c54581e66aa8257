"""`POST /v1/completions` and `/v1/chat/completions`: one request from its body to its last byte.

Nothing is sent before the first delta, so everything that fails until then has a real status. After
that an error is one event of the stream. A client that leaves is noticed by a task that does nothing
but wait for it, and its tokens stop being made within a turn of the loop.
"""

from __future__ import annotations

import asyncio
from collections.abc import MutableMapping
from typing import Any, Generic

from core.errors import BatonError, InvalidParameter, Unavailable
from planning.plan import Forced
from services.router.bugs import reported
from services.router.choice import Piece
from services.router.generation import Generation, Part
from services.router.parse import Receive, check_request, parse, read_body
from services.router.progress import Progress
from services.router.router import Router
from services.router.session import INBOX_DELTAS_PER_CHOICE, Inbox
from services.router.shapes import B, Shape
from services.router.sse import Reply, Send


class ClientGone(Exception):
    """The client closed its connection."""


class GenerationEndpoint(Generic[B]):
    """An ASGI application for one path."""

    def __init__(self, router: Router, body: type[B], shape: type[Shape[B]]) -> None:
        self._router = router
        self._body = body
        self._shape = shape

    async def __call__(self, scope: MutableMapping[str, Any], receive: Receive, send: Send) -> None:
        router = self._router
        text, _ = router.serving()
        with router.admit():
            body = parse(await read_body(scope, receive, router.settings.max_body_bytes), self._body)
            router.check_model(body.model)
            check_request(body)
            forced = _forced_plan(scope)
            inbox = Inbox(INBOX_DELTAS_PER_CHOICE * body.n * body.num_prompts)
            progress = Progress(router.metrics, text.name, scope.get("baton_request_id", ""))
            watcher = asyncio.create_task(_watch_client(receive, inbox))
            try:
                await self._run(body, forced, inbox, progress, Reply(send))
            finally:
                watcher.cancel()
                progress.close()

    async def _run(self, body: B, forced: Forced, inbox: Inbox, progress: Progress, reply: Reply) -> None:
        limit_s = self._router.settings.request_timeout_s
        try:
            try:
                async with asyncio.timeout(limit_s):
                    await self._answer(body, forced, inbox, progress, reply)
            except TimeoutError:
                raise Unavailable(f"the answer was not complete after {limit_s:g} s; ask for less") from None
        except ClientGone:
            progress.client_gone()
        except asyncio.CancelledError:
            progress.failed(Unavailable("the router is shutting down"))
            raise
        except BatonError as error:
            await self._fail(error, progress, reply)
        except Exception as error:
            await self._fail(reported(error), progress, reply)

    async def _fail(self, error: BatonError, progress: Progress, reply: Reply) -> None:
        progress.failed(error)
        if not reply.started:
            raise error
        await reply.fail(error)

    async def _answer(self, body: B, forced: Forced, inbox: Inbox, progress: Progress, reply: Reply) -> None:
        text, _ = self._router.serving()
        prompts, constraints = await text.prompts(body), await text.constraints(body)
        request_id = progress.record.request_id
        generation = Generation(request_id, self._router, body, prompts, constraints, forced, inbox)
        try:
            generation.start()
            progress.started(generation)
            shape = self._shape(body, text.tokenizer, text.name, generation.id)
            if body.stream:
                await self._stream(body, generation, shape, progress, reply)
            else:
                await self._whole(generation, shape, progress, reply)
        finally:
            generation.close()
            progress.ended(generation)

    async def _stream(
        self, body: B, generation: Generation, shape: Shape[B], progress: Progress, reply: Reply
    ) -> None:
        while not generation.finished:
            pieces = await generation.next()
            progress.took(generation, pieces)
            if not reply.started:
                await reply.open(_plan_headers(generation))
            await reply.events(shape.chunks(pieces))
        if body.include_usage:
            await reply.events([shape.usage_chunk(generation.usage())])
        await reply.done()

    async def _whole(self, generation: Generation, shape: Shape[B], progress: Progress, reply: Reply) -> None:
        answers: dict[int, tuple[Part, Piece]] = {}
        while not generation.finished:
            pieces = await generation.next()
            progress.took(generation, pieces)
            for part, piece in pieces:
                _, answer = answers.setdefault(piece.index, (part, Piece(piece.index)))
                answer.append(piece)
        ordered = [answers[index] for index in sorted(answers)]
        await reply.json(shape.whole(ordered, generation.usage()), _plan_headers(generation))


async def _watch_client(receive: Receive, inbox: Inbox) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
    inbox.fail(ClientGone(), at_once=True)


def _forced_plan(scope: MutableMapping[str, Any]) -> Forced:
    values = [value for name, value in scope["headers"] if name == b"x-baton-plan"]
    try:
        return Forced(values[0].decode("latin-1").strip().lower()) if values else Forced.AUTO
    except ValueError:
        known = ", ".join(Forced)
        raise InvalidParameter(
            f"the header X-Baton-Plan takes one of {known}", param="X-Baton-Plan"
        ) from None


def _plan_headers(generation: Generation) -> list[tuple[str, str]]:
    """How the (first) prompt was served."""
    plan = generation.parts[0].plan
    return [
        ("x-baton-plan", plan.kind.value),
        ("x-baton-reason", plan.reason.value),
        ("x-baton-prefill", plan.prefill.worker_id if plan.prefill else "none"),
        ("x-baton-decode", plan.decode.worker_id),
    ]
