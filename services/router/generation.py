"""The life of one client request on the workers: plan, start, take deltas, end.

    prompts --plan--> one Start each --> deltas --Choice--> pieces of text
               ^                          | `-- a stop string matched: Cancel of that choice
               '------- stranded <-- lost-'

Prompt p with n choices each has the answers p*n .. p*n + n-1. A prompt whose worker is lost, or refuses it,
is planned anew and goes on elsewhere from the tokens that have come; the client sees a pause. However it
goes, `close` leaves nothing running: what has not finished is cancelled at its worker.
"""

from __future__ import annotations

from collections.abc import Sequence

from core.clock import monotonic
from core.errors import BatonError, ContextLengthExceeded, EngineFault, Overloaded, Unavailable, WorkerLost
from core.request import Gathered, Request, SamplingParams, TokenDelta
from planning.estimate import Targets
from planning.plan import Forced, Plan
from planning.recovery import Cause, Denial, Resume
from services.router import recovery
from services.router.choice import Choice, Piece
from services.router.part import Part
from services.router.planner import replanned, target
from services.router.recovery import Stranded
from services.router.router import Router
from services.router.schemas import GenerationBody
from services.router.session import Inbox, Lost
from services.router.text import Constraints, Prompt

SEED_BITS = 64

LOOK_EVERY_S = 0.1
"""How often a stranded prompt looks for a worker."""


class Generation:
    """`start` once, `next` until `finished`, `close` always."""

    def __init__(
        self,
        request_id: str,
        router: Router,
        body: GenerationBody,
        prompts: Sequence[Prompt],
        plans: Sequence[tuple[tuple[bytes, ...], Plan]],
        constraints: Constraints,
        forced: Forced,
        targets: Targets,
        inbox: Inbox,
    ) -> None:
        """`plans`: of `planner.planned`, for each prompt."""
        self.id = request_id
        self._router = router
        self._text, self._fleet = router.serving()
        self._body, self._constraints = body, constraints
        self._forced, self._targets = forced, targets
        self._inbox = inbox
        self._seed = _seed(body, router)
        self._stop_token_ids = frozenset(body.stop_token_ids) | (
            frozenset() if body.ignore_eos else frozenset(self._text.eos_token_ids)
        )
        self.parts = [
            Part(prompt, hashes, chosen, self._choices(number), f"{self.id}-{number}")
            for number, (prompt, (hashes, chosen)) in enumerate(zip(prompts, plans, strict=True))
        ]
        self._by_request: dict[str, Part] = {}
        self._stranded: list[Stranded] = []
        self._failure: BatonError | None = None
        self.resumes: list[Resume] = []
        self.num_generated_tokens = 0
        """Of all choices."""

    @property
    def finished(self) -> bool:
        return not (self._by_request or self._stranded or self._failure)

    @property
    def num_prompt_tokens(self) -> int:
        """Tokens of all prompts, each counted once however many choices it has."""
        return sum(len(part.prompt.token_ids) for part in self.parts)

    @property
    def gathered(self) -> list[Gathered]:
        return [part.gathered for part in self.parts if part.gathered is not None]

    def usage(self) -> dict[str, object]:
        """OpenAI's usage object."""
        cached = sum(g.reused_tokens for g in self.gathered)
        return {
            "prompt_tokens": self.num_prompt_tokens,
            "completion_tokens": self.num_generated_tokens,
            "total_tokens": self.num_prompt_tokens + self.num_generated_tokens,
            "prompt_tokens_details": {"cached_tokens": cached},
        }

    def start(self) -> None:
        """Send every prompt to its worker, or look for another where that one has left since the plan. Raises
        Unavailable or Overloaded."""
        for part in self.parts:
            now = monotonic()
            self._router.retries.began(now)
            try:
                self._send(part)
            except WorkerLost as error:
                lost = Lost(part.request_id, error, Cause.LEFT)
                self._stranded.append(recovery.stranded(self._router, part, lost, now))

    async def next(self) -> list[tuple[Part, Piece]]:
        """What the next deltas made certain: a piece of each choice that they are of, which may be empty; of
        one choice at least, until it is finished. Raises what ended the request, after what came before."""
        pieces: dict[int, tuple[Part, Piece]] = {}
        while not (pieces or self.finished):
            if self._failure is not None:
                raise self._failure
            items = await self._inbox.get(LOOK_EVERY_S if self._stranded else None)
            try:
                for item in items:
                    if isinstance(item, Lost):
                        self._lose(item)
                    elif taken := self._take(item):
                        _, piece = taken
                        if piece.index in pieces:
                            pieces[piece.index][1].append(piece)
                        else:
                            pieces[piece.index] = taken
                self._stranded = [each for each in self._stranded if not self._goes_on(each)]
            except BatonError as error:
                self._failure = error
        return list(pieces.values())

    def close(self) -> None:
        """Cancel what has not finished. Idempotent."""
        for part in self._by_request.values():
            if part.session is not None:
                part.session.cancel(part.request_id)
            if part.placed is not None:
                part.placed.over()
        self._by_request.clear()
        self._stranded.clear()

    def _send(self, part: Part) -> None:
        """To the worker that is planned for it. Raises Unavailable, Overloaded or WorkerLost."""
        session = self._fleet.session(part.plan.decode.incarnation)
        if session is None:
            raise WorkerLost(f"decode worker {part.plan.decode.worker_id} was lost; try again")
        session.start(self._request(part), self._inbox)
        part.session, part.num_before = session, part.num_tokens
        self._by_request[part.request_id] = part
        part.placed = self._fleet.place(part.request_id, part.plan, part.open_choices)
        self._router.metrics.plans.labels(part.plan.kind.value, part.plan.reason.value).inc()

    def _lose(self, lost: Lost) -> None:
        """A try is over without its answer. Raises what ends the whole request."""
        if part := self._by_request.pop(lost.request_id, None):
            assert part.placed is not None
            part.placed.over()
            self._stranded.append(recovery.stranded(self._router, part, lost, monotonic()))

    def _goes_on(self, each: Stranded) -> bool:
        """Whether a worker was found for it. Raises what it was lost to once none is looked for any more."""
        part, now, before = each.part, monotonic(), each.part.plan
        if not recovery.may_go_on(self._router, each, now):
            return False
        avoid = part.tries.avoided(now)
        try:
            part.plan = replanned(self._router, self._body, part, avoid, self._forced, self._targets)
            self._send(part)
        except (Unavailable, Overloaded, WorkerLost, ContextLengthExceeded):
            part.plan = before
            if recovery.may_wait(self._router, each, now):
                return False
            raise recovery.denied(self._router, part, each.error, Denial.NO_WORKER) from None
        self.resumes.append(recovery.resumed(self._router, each, before.decode.worker_id))
        return True

    def _choices(self, number: int) -> list[Choice]:
        body, n = self._body, self._body.n
        return [
            Choice(number * n + i, self._text.tokenizer, body.stop, self._stop_token_ids, body.min_tokens)
            for i in range(n)
        ]

    def _request(self, part: Part) -> Request:
        return Request(
            request_id=part.request_id,
            prompt_token_ids=part.prompt.token_ids,
            sampling=self._sampling(part),
            block_hashes=part.block_hashes,
            cache_salt=self._body.cache_salt,
            prefill=target(part.plan),
            epoch=part.epoch,
            resumed=part.resumed,
            itl_slo_s=self._targets.itl_s,
        )

    def _sampling(self, part: Part) -> SamplingParams:
        body, max_tokens = self._body, part.plan.max_tokens
        return SamplingParams(
            max_tokens=max_tokens,
            seed=self._seed,
            min_tokens=min(body.min_tokens, max_tokens),
            n=body.n,
            temperature=body.temperature,
            top_p=max(body.top_p, 1e-6),  # 0 keeps the best token, as in OpenAI's API
            top_k=max(body.top_k, 0),
            min_p=body.min_p,
            presence_penalty=body.presence_penalty,
            frequency_penalty=body.frequency_penalty,
            repetition_penalty=body.repetition_penalty,
            stop_token_ids=self._stop_token_ids,
            logit_bias=tuple(sorted(body.logit_bias.items())),
            allowed_token_ids=tuple(sorted(set(body.allowed_token_ids or ()))),
            bad_words=self._constraints.bad_words,
            grammar=self._constraints.grammar,
            logprobs=body.num_logprobs,
            prompt_logprobs=body.prompt_logprobs and not part.logprobs,
        )

    def _take(self, delta: TokenDelta) -> tuple[Part, Piece] | None:
        part = self._by_request.get(delta.request_id)
        if part is None:
            return None
        if delta.index >= len(part.choices):
            raise EngineFault(f"the decode worker answered for choice {delta.index}, which was not asked for")
        assert part.placed is not None
        if not part.placed.has_begun:
            part.placed.began(delta.gathered)
        part.gathered = part.gathered or delta.gathered
        part.logprobs = delta.prompt_logprobs or part.logprobs
        choice = part.choices[delta.index]
        if choice.finished:
            return None
        if self._body.prompt_logprobs and len(part.logprobs) != len(part.prompt.token_ids):
            raise EngineFault("the decode worker did not send the prompt's log probabilities")
        piece = choice.feed(delta)
        self.num_generated_tokens += piece.num_generated
        if choice.finished:
            self._end(part, delta)
        return part, piece

    def _end(self, part: Part, delta: TokenDelta) -> None:
        """A choice has finished: tell its worker, unless that is where it ended."""
        assert part.session is not None
        assert part.placed is not None
        part.placed.choice_over()
        if part.finished:
            part.placed.over()
            del self._by_request[part.request_id]
        if delta.finish_reason is None:
            part.session.cancel(part.request_id, None if part.finished else delta.index)
        elif part.finished:
            part.session.forget(part.request_id)


def _seed(body: GenerationBody, router: Router) -> int:
    """64 bits, unsigned; choice i draws with seed + i."""
    seed = router.rng.getrandbits(SEED_BITS) if body.seed is None else body.seed
    return seed % 2**SEED_BITS
