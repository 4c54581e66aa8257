"""The life of one client request on the workers: plan, start, take deltas, end.

    prompts --plan--> one Start each --> deltas --Choice--> pieces of text
                                          `-- a stop string matched: Cancel of that choice

Prompt p with n choices each has the answers p*n .. p*n + n-1. However it goes, `close` leaves nothing
running: what has not finished is cancelled at its worker.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from core.errors import EngineFault, WorkerLost
from core.request import (
    Gathered,
    Request,
    SamplingParams,
    TokenDelta,
    TokenLogprob,
)
from planning.plan import Forced, Plan
from services.router.choice import Choice, Piece
from services.router.planner import planned, target
from services.router.router import Router
from services.router.schemas import GenerationBody
from services.router.session import Inbox, Session
from services.router.text import Constraints, Prompt

SEED_BITS = 64


@dataclass(slots=True)
class Part:
    """One prompt with its choices, running on one decode worker."""

    prompt: Prompt
    block_hashes: tuple[bytes, ...]
    plan: Plan
    choices: list[Choice]
    request_id: str
    session: Session | None = None
    gathered: Gathered | None = None
    logprobs: tuple[TokenLogprob | None, ...] = field(default=())

    @property
    def finished(self) -> bool:
        return all(choice.finished for choice in self.choices)


class Generation:
    """`start` once, `next` until `finished`, `close` always."""

    def __init__(
        self,
        request_id: str,
        router: Router,
        body: GenerationBody,
        prompts: Sequence[Prompt],
        constraints: Constraints,
        forced: Forced,
        inbox: Inbox,
    ) -> None:
        """Plan every prompt. Raises RequestError or Unavailable before any worker is touched."""
        self.id = request_id
        self._router = router
        self._text, self._fleet = router.serving()
        self._body, self._constraints = body, constraints
        self._inbox = inbox
        self._seed = _seed(body, router)
        self._stop_token_ids = frozenset(body.stop_token_ids) | (
            frozenset() if body.ignore_eos else frozenset(self._text.eos_token_ids)
        )
        self.parts = [
            Part(prompt, hashes, chosen, self._choices(number), f"{self.id}-{number}")
            for number, (prompt, (hashes, chosen)) in enumerate(
                zip(prompts, planned(router, body, prompts, forced), strict=True)
            )
        ]
        self._by_request = {part.request_id: part for part in self.parts}

    @property
    def finished(self) -> bool:
        return not self._by_request

    @property
    def num_prompt_tokens(self) -> int:
        """Tokens of all prompts, each counted once however many choices it has."""
        return sum(len(part.prompt.token_ids) for part in self.parts)

    @property
    def num_generated_tokens(self) -> int:
        return sum(choice.num_tokens for part in self.parts for choice in part.choices)

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
        """Send every prompt to its worker. Raises Unavailable or Overloaded."""
        for part in self.parts:
            session = self._fleet.session(part.plan.decode.incarnation)
            if session is None:
                raise WorkerLost(f"decode worker {part.plan.decode.worker_id} was lost; try again")
            session.start(self._request(part), self._inbox)
            part.session = session
            self._fleet.assigned(part.plan, self._body.n)
            self._router.metrics.plans.labels(part.plan.kind.value, part.plan.reason.value).inc()

    async def next(self) -> list[tuple[Part, Piece]]:
        """What the next deltas made certain; a piece may be empty. Raises what ended the request."""
        taken = (self._take(delta) for delta in await self._inbox.get())
        return [piece for piece in taken if piece is not None]

    def close(self) -> None:
        """Cancel what has not finished. Idempotent."""
        for part in self._by_request.values():
            if part.session is not None:
                part.session.cancel(part.request_id)
        self._by_request.clear()

    def _choices(self, number: int) -> list[Choice]:
        body, n = self._body, self._body.n
        return [
            Choice(number * n + i, self._text.tokenizer, body.stop, self._stop_token_ids, body.min_tokens)
            for i in range(n)
        ]

    def _request(self, part: Part) -> Request:
        prefill = part.plan.prefill
        return Request(
            request_id=part.request_id,
            prompt_token_ids=part.prompt.token_ids,
            sampling=self._sampling(part.plan.max_tokens),
            block_hashes=part.block_hashes,
            cache_salt=self._body.cache_salt,
            prefill=prefill and target(prefill, part.plan.reason, self._router.settings.min_remote_tokens),
        )

    def _sampling(self, max_tokens: int) -> SamplingParams:
        body = self._body
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
            prompt_logprobs=body.prompt_logprobs,
        )

    def _take(self, delta: TokenDelta) -> tuple[Part, Piece] | None:
        part = self._by_request.get(delta.request_id)
        if part is None:
            return None
        if delta.index >= len(part.choices):
            raise EngineFault(f"the decode worker answered for choice {delta.index}, which was not asked for")
        part.gathered = delta.gathered or part.gathered
        part.logprobs = delta.prompt_logprobs or part.logprobs
        choice = part.choices[delta.index]
        if choice.finished:
            return None
        if self._body.prompt_logprobs and len(part.logprobs) != len(part.prompt.token_ids):
            raise EngineFault("the decode worker did not send the prompt's log probabilities")
        piece = choice.feed(delta)
        if choice.finished:
            self._end(part, delta)
        return part, piece

    def _end(self, part: Part, delta: TokenDelta) -> None:
        """A choice has finished: tell its worker, unless that is where it ended."""
        assert part.session is not None
        if part.finished:
            del self._by_request[part.request_id]
        if delta.finish_reason is None:
            part.session.cancel(part.request_id, None if part.finished else delta.index)
        elif part.finished:
            part.session.forget(part.request_id)


def _seed(body: GenerationBody, router: Router) -> int:
    """64 bits, unsigned; choice i draws with seed + i."""
    seed = router.rng.getrandbits(SEED_BITS) if body.seed is None else body.seed
    return seed % 2**SEED_BITS
