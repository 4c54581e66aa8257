"""The fleet as the planner sees it: values, one for each worker that may be chosen."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from math import inf

from core.kv import Fingerprint
from core.step_model import GUESSED_DECODE, GUESSED_PREFILL, StepModel

Found = Mapping[str, int]
"""Leading blocks of a prompt that a worker brings, by the tier they are in."""


@dataclass(frozen=True, slots=True)
class Sent:
    """Work that a worker was given: sequences, prompt tokens to compute, tokens that they will attend to."""

    sequences: int = 0
    tokens: int = 0
    context_tokens: int = 0

    def __add__(self, more: Sent) -> Sent:
        return Sent(
            self.sequences + more.sequences,
            self.tokens + more.tokens,
            self.context_tokens + more.context_tokens,
        )

    def less(self, done: Sent) -> Sent:
        """What is left of it."""
        return Sent(
            max(0, self.sequences - done.sequences),
            max(0, self.tokens - done.tokens),
            max(0, self.context_tokens - done.context_tokens),
        )

    def times(self, choices: int) -> Sent:
        """Of a request with so many choices: they share the prompt's computing."""
        return Sent(choices * self.sequences, self.tokens, choices * self.context_tokens)


GUESSED_CHUNK_TOKENS = 256
"""Of a worker that does not say how many prompt tokens a step of it computes."""

GUESSED_WAY_S = 0.005
"""To a worker and back, where no answer has come from it yet: one host's, or one data centre's, gRPC."""


@dataclass(frozen=True, slots=True)
class WorkerView:
    """A worker that takes requests now, as its last State, what was sent since then and what ended have it.

    `load`: sequences it has or is about to have, `running` of them in its steps, `waiting` not begun.
    `queued_tokens`: of prompts, to compute. `context_tokens`: KV tokens its decoding attends to.
    `max_num_seqs`: that run at once, 0 = not known. `chunk_tokens`: prompt tokens of a step at most.
    `tier_token_s`: seconds in which a tier brings a token. `link_nbytes_per_s`: as measured by its pulls, by
    the prefill worker's incarnation. `way_s`: seconds of an answer that the worker does not count, to it and
    back. `step_began_at`: when its present step began, in `FleetView.now`'s seconds; inf = none runs yet.
    """

    worker_id: str
    address: str
    incarnation: str
    fingerprint: Fingerprint
    total_blocks: int
    load: int = 0
    running: int = 0
    waiting: int = 0
    queued_tokens: int = 0
    context_tokens: int = 0
    max_num_seqs: int = 0
    chunk_tokens: int = GUESSED_CHUNK_TOKENS
    prefill_model: StepModel = GUESSED_PREFILL
    decode_model: StepModel = GUESSED_DECODE
    tier_token_s: Mapping[str, float] = field(default_factory=dict)
    link_nbytes_per_s: Mapping[str, float] = field(default_factory=dict)
    way_s: float = GUESSED_WAY_S
    step_began_at: float = inf

    @property
    def max_tokens(self) -> int:
        """The longest prompt + answer it can hold: the model's limit or its pool, the smaller one."""
        return min(self.fingerprint.max_model_len, self.total_blocks * self.fingerprint.block_size)

    def given(self, sent: Sent) -> WorkerView:
        """The same worker with work that no State of it shows yet."""
        return replace(
            self,
            load=self.load + sent.sequences,
            waiting=self.waiting + sent.sequences,
            queued_tokens=self.queued_tokens + sent.tokens,
            context_tokens=self.context_tokens + sent.context_tokens,
        )


@dataclass(frozen=True, slots=True)
class FleetView:
    """The workers that one request may go to. Prefill workers may differ in fingerprint; `plan` pairs them.

    By incarnation: `found`, what each one holds of the prompt; `recent`, sequences it was sent lately, over
    or not, see `planning.balance`. `now`: seconds of the router's clock.
    """

    decode: tuple[WorkerView, ...] = ()
    prefill: tuple[WorkerView, ...] = ()
    found: Mapping[str, Found] = field(default_factory=dict)
    recent: Mapping[str, float] = field(default_factory=dict)
    now: float = 0.0

    def given(self, work: Mapping[str, Sent]) -> FleetView:
        """The fleet once each worker, by incarnation, has got this work too."""
        if not work:
            return self

        def busier(workers: tuple[WorkerView, ...]) -> tuple[WorkerView, ...]:
            return tuple(w.given(work[w.incarnation]) if w.incarnation in work else w for w in workers)

        more = {each: self.recent.get(each, 0.0) + sent.sequences for each, sent in work.items()}
        return replace(
            self,
            decode=busier(self.decode),
            prefill=busier(self.prefill),
            recent={**self.recent, **more},
        )
