"""`POST /v1/completions` and `/v1/chat/completions`: one request from its body to its last byte.

Nothing is sent before the first delta, so everything that fails until then has a real status. After
that an error is one event of the stream. A client that leaves is noticed by a task that does nothing
but wait for it, and its tokens stop being made within a turn of the loop.
"""

from __future__ import annotations

import asyncio
from collections.abc import MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic

from core.errors import BatonError, InvalidParameter, Unavailable
from planning.plan import Forced
from services.router.admission import Visit
from services.router.bugs import reported
from services.router.choice import Piece
from services.router.generation import Generation, Part
from services.router.headers import header
from services.router.keys import ApiKey
from services.router.parse import Receive, check_request, read_body
from services.router.planner import planned
from services.router.progress import Progress
from services.router.record import Record
from services.router.router import Router
from services.router.session import INBOX_DELTAS_PER_CHOICE, Inbox
from services.router.shapes import B, Shape
from services.router.shutdown import cut_off
from services.router.sse import Reply, Send
from services.router.targets import left, targets_of
from services.router.text import Constraints, Prompt


class ClientGone(Exception):
    """The client closed its connection."""


@dataclass(frozen=True, slots=True)
class _Call(Generic[B]):
    """One request and what is told of it."""

    body: B
    forced: Forced
    inbox: Inbox
    visit: Visit
    progress: Progress
    reply: Reply

    async def fail(self, error: BatonError) -> None:
        """End the answer with an error; raises it where nothing was sent yet."""
        self.progress.failed(error)
        if not self.reply.started:
            raise error
        await self.reply.fail(error)


class GenerationEndpoint(Generic[B]):
    """An ASGI application for one path."""

    def __init__(self, router: Router, body: type[B], shape: type[Shape[B]]) -> None:
        self._router = router
        self._body = body
        self._shape = shape

    async def __call__(self, scope: MutableMapping[str, Any], receive: Receive, send: Send) -> None:
        router = self._router
        text, _ = router.serving()
        targets = targets_of(scope, router.settings)
        key: ApiKey = scope["baton_key"]
        record = Record(scope["baton_request_id"], text.name, key.name, targets)
        progress = Progress(router.metrics, router.records, record)
        try:
            with router.admit(key.share) as visit:
                raw = await read_body(scope, receive, router.settings.max_body_bytes)
                body = await text.read(raw, self._body)
                router.check_model(body.model)
                check_request(body)
                forced = _forced_plan(scope)
                inbox = Inbox(INBOX_DELTAS_PER_CHOICE * body.n * body.num_prompts)
                call = _Call(body, forced, inbox, visit, progress, Reply(send))
                watcher = asyncio.create_task(_watch_client(receive, inbox, visit))
                try:
                    await self._run(call)
                finally:
                    watcher.cancel()
        except BaseException as error:
            progress.failed(_as_told(error))
            raise
        finally:
            progress.close()

    async def _run(self, call: _Call[B]) -> None:
        limit_s = self._router.settings.request_timeout_s
        try:
            try:
                async with asyncio.timeout(limit_s):
                    await self._answer(call)
            except TimeoutError:
                raise Unavailable(f"the answer was not complete after {limit_s:g} s; ask for less") from None
        except ClientGone:
            call.progress.client_gone()
        except asyncio.CancelledError:
            await call.fail(cut_off())
        except BatonError as error:
            await call.fail(error)
        except Exception as error:
            await call.fail(reported(error))

    async def _answer(self, call: _Call[B]) -> None:
        body, progress = call.body, call.progress
        text, _ = self._router.serving()
        prompts, constraints = await text.prompts(body), await text.constraints(body)
        generation = await self._planned(call, prompts, constraints)
        try:
            generation.start()
            call.visit.placed(generation)
            progress.started()
            shape = self._shape(body, text.tokenizer, text.name, generation.id)
            if body.stream:
                await self._stream(call, generation, shape)
            else:
                await self._whole(call, generation, shape)
        finally:
            generation.close()
            progress.ended(generation)
            call.visit.served(generation)

    async def _planned(
        self, call: _Call[B], prompts: Sequence[Prompt], constraints: Constraints
    ) -> Generation:
        """A generation whose turn it is. What can never be served is an error before it waits; after a wait
        it is planned anew."""
        router, record = self._router, call.progress.record

        async def plan() -> Generation:
            targets = left(record.targets, record.elapsed_s)
            plans = await planned(router, call.body, prompts, call.forced, targets)
            made = Generation(
                *(record.request_id, router, call.body, prompts, plans),
                *(constraints, call.forced, targets, call.inbox),
            )
            call.progress.planned(made)
            return made

        generation = await plan()
        waited = await call.visit.turn(call.body, generation.parts, record.targets)
        return await plan() if waited else generation

    async def _stream(self, call: _Call[B], generation: Generation, shape: Shape[B]) -> None:
        reply = call.reply
        while not generation.finished:
            pieces = await generation.next()
            call.progress.took(generation, pieces)
            if not reply.started:
                await reply.open(_plan_headers(generation))
            await reply.events(shape.events(pieces))
            if (rest_s := self._router.pace.rest_s) and not generation.finished:
                await asyncio.sleep(rest_s)
        if call.body.include_usage:
            await reply.events(shape.usage_event(generation.usage()))
        await reply.done()

    async def _whole(self, call: _Call[B], generation: Generation, shape: Shape[B]) -> None:
        answers: dict[int, tuple[Part, Piece]] = {}
        while not generation.finished:
            pieces = await generation.next()
            call.progress.took(generation, pieces)
            for part, piece in pieces:
                _, answer = answers.setdefault(piece.index, (part, Piece(piece.index)))
                answer.append(piece)
        ordered = [answers[index] for index in sorted(answers)]
        await call.reply.json(shape.whole(ordered, generation.usage()), _plan_headers(generation))


async def _watch_client(receive: Receive, inbox: Inbox, visit: Visit) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
    inbox.fail(ClientGone(), at_once=True)
    visit.fail(ClientGone())


def _forced_plan(scope: MutableMapping[str, Any]) -> Forced:
    wish = header(scope, "X-Baton-Plan")
    try:
        return Forced.AUTO if wish is None else Forced(wish.lower())
    except ValueError:
        known = ", ".join(Forced)
        raise InvalidParameter(
            f"the header X-Baton-Plan takes one of {known}", param="X-Baton-Plan"
        ) from None


def _as_told(error: BaseException) -> BatonError:
    """What the gate makes of an error that passes here."""
    if isinstance(error, BatonError):
        return error
    return cut_off() if isinstance(error, asyncio.CancelledError) else BatonError("the router failed")


def _plan_headers(generation: Generation) -> list[tuple[str, str]]:
    """How the (first) prompt was served."""
    plan = generation.parts[0].plan
    return [
        ("x-baton-plan", plan.kind.value),
        ("x-baton-reason", plan.reason.value),
        ("x-baton-prefill", plan.prefill.worker_id if plan.prefill else "none"),
        ("x-baton-decode", plan.decode.worker_id),
        ("x-baton-predicted-ttft-ms", f"{plan.chosen.estimate.ttft_s * 1000:.1f}"),
    ]
