"""Which workers serve a request: a pure function of the request, the fleet and the client's wish.

    prompt needs logits of its own tokens          -> local
    client asked for local or disaggregated        -> that, or an error that says why not
    a prefill worker can help and it is worth it   -> disaggregated
    otherwise                                      -> local: the decode worker computes everything

A prefill worker can help with full blocks that end before the last token. A forced handoff asks it for
every one that the decode worker lacks, worth it or not; a prompt without any is an InvalidParameter.

A decode worker is chosen first, of those that can hold the whole request the one that it costs least
(`planning.balance`), then so a prefill worker whose fingerprint is the same.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

from core.blocks import num_shareable_blocks
from core.errors import ContextLengthExceeded, InvalidParameter, Unavailable
from core.kv import Fingerprint
from core.request import PlanKind
from planning.balance import cost_tokens


class Forced(StrEnum):
    """What the client asked for in `X-Baton-Plan`."""

    AUTO = "auto"
    LOCAL = "local"
    DISAGGREGATED = "disaggregated"


class Reason(StrEnum):
    """Why a plan is what it is: a metric label and a response header."""

    LONG_PROMPT = "long_prompt"
    SHORT_PROMPT = "short_prompt"
    FORCED_LOCAL = "forced_local"
    FORCED_DISAGGREGATED = "forced_disaggregated"
    NO_PREFILL_WORKER = "no_prefill_worker"
    NO_COMPATIBLE_PREFILL = "no_compatible_prefill"
    PROMPT_EXCEEDS_PREFILL_POOL = "prompt_exceeds_prefill_pool"
    NEEDS_PROMPT_LOGPROBS = "needs_prompt_logprobs"


_WHY_NOT = {
    Reason.NO_PREFILL_WORKER: "no prefill worker is ready",
    Reason.NO_COMPATIBLE_PREFILL: "no prefill worker has the decode worker's fingerprint",
    Reason.PROMPT_EXCEEDS_PREFILL_POOL: "the prompt's blocks exceed the pool of every prefill worker",
}


@dataclass(frozen=True, slots=True)
class RequestFacts:
    """What planning needs to know of a request.

    `max_tokens`: the client's limit, None = as many as fit, but not more than `default_max_tokens`.
    `param` is the name under which the client gave its prompt, for error messages.
    """

    num_prompt_tokens: int
    max_tokens: int | None = None
    default_max_tokens: int | None = None
    prompt_logprobs: bool = False
    param: str = "prompt"


@dataclass(frozen=True, slots=True)
class WorkerView:
    """A worker that takes requests now.

    `load`: sequences it has or is about to have. `recent`: those it was sent lately, over or not.
    `credit_tokens`: of the request that is planned, see `planning.balance`. `token_s`: seconds in which it
    computes a prompt token, 0 when not known.
    """

    worker_id: str
    address: str
    incarnation: str
    fingerprint: Fingerprint
    total_blocks: int
    load: int
    recent: float = 0.0
    credit_tokens: float = 0.0
    token_s: float = 0.0

    @property
    def max_tokens(self) -> int:
        """The longest prompt + answer it can hold: the model's limit or its pool, the smaller one."""
        return min(self.fingerprint.max_model_len, self.total_blocks * self.fingerprint.block_size)


@dataclass(frozen=True, slots=True)
class FleetView:
    """The workers that are ready. Prefill workers may differ in fingerprint; `plan` pairs them."""

    decode: tuple[WorkerView, ...] = ()
    prefill: tuple[WorkerView, ...] = ()

    def after(self, plan: Plan, sequences: int) -> FleetView:
        """The fleet once `plan` has brought its workers so many sequences more."""
        busier = {worker.incarnation for worker in plan.workers}
        return self._each(
            lambda w: (
                replace(w, load=w.load + sequences, recent=w.recent + sequences)
                if w.incarnation in busier
                else w
            )
        )

    def credited(self, credits: Mapping[str, float]) -> FleetView:
        """The fleet as one request sees it: tokens that each worker, by incarnation, need not compute."""
        return self._each(lambda w: replace(w, credit_tokens=credits.get(w.incarnation, 0.0)))

    def _each(self, change: Callable[[WorkerView], WorkerView]) -> FleetView:
        return FleetView(tuple(map(change, self.decode)), tuple(map(change, self.prefill)))


@dataclass(frozen=True, slots=True)
class Plan:
    """`max_tokens`: how many tokens each choice may have, resolved for the chosen worker."""

    kind: PlanKind
    decode: WorkerView
    prefill: WorkerView | None
    reason: Reason
    max_tokens: int

    @property
    def workers(self) -> tuple[WorkerView, ...]:
        return (self.decode,) if self.prefill is None else (self.decode, self.prefill)


def plan(
    request: RequestFacts,
    fleet: FleetView,
    forced: Forced,
    *,
    min_remote_tokens: int,
    rng: random.Random,
) -> Plan:
    """Choose the workers of one request; equal ones at random.

    Raises Unavailable when no worker can take it now, ContextLengthExceeded when none ever could,
    InvalidParameter when the wish contradicts the request.
    """
    if not fleet.decode:
        raise Unavailable("no decode worker is ready; try again, /v1/cluster shows their states")
    decode = _cheapest(request, _with_room(request, fleet.decode), rng)
    left = decode.max_tokens - request.num_prompt_tokens
    max_tokens = request.max_tokens or min(left, request.default_max_tokens or left)
    prefill, reason = _choose_prefill(request, fleet.prefill, decode, forced, min_remote_tokens, rng)
    kind = PlanKind.LOCAL if prefill is None else PlanKind.DISAGGREGATED
    return Plan(kind, decode, prefill, reason, max_tokens)


def _cheapest(request: RequestFacts, workers: Sequence[WorkerView], rng: random.Random) -> WorkerView:
    tokens = request.num_prompt_tokens
    costs = [cost_tokens(tokens, worker.credit_tokens, worker.load + worker.recent) for worker in workers]
    least = min(costs)
    return rng.choice([worker for worker, cost in zip(workers, costs, strict=True) if cost == least])


def _with_room(request: RequestFacts, workers: Sequence[WorkerView]) -> list[WorkerView]:
    need = request.num_prompt_tokens + (request.max_tokens or 1)
    room = [worker for worker in workers if worker.max_tokens >= need]
    if room:
        return room
    limit = max(worker.max_tokens for worker in workers)
    wanted = "at least 1 token" if request.max_tokens is None else f"{request.max_tokens} tokens"
    raise ContextLengthExceeded(
        f"prompt and answer together can have at most {limit} tokens, but this request needs {need}: "
        f"{request.num_prompt_tokens} in the prompt and {wanted} of answer; shorten one of them",
        param=request.param,
    )


def _choose_prefill(
    request: RequestFacts,
    workers: Sequence[WorkerView],
    decode: WorkerView,
    forced: Forced,
    min_remote_tokens: int,
    rng: random.Random,
) -> tuple[WorkerView | None, Reason]:
    if request.prompt_logprobs:
        if forced is Forced.DISAGGREGATED:
            raise InvalidParameter(
                "echo with logprobs needs every logit of the prompt, which only the decode worker "
                "computes; leave X-Baton-Plan out or set it to local",
                param="X-Baton-Plan",
            )
        return None, Reason.NEEDS_PROMPT_LOGPROBS
    if forced is Forced.LOCAL:
        return None, Reason.FORCED_LOCAL
    block_size = decode.fingerprint.block_size
    shareable = num_shareable_blocks(request.num_prompt_tokens, block_size) * block_size
    if forced is Forced.DISAGGREGATED and not shareable:
        raise InvalidParameter(
            f"X-Baton-Plan: disaggregated is not possible: a prefill worker hands over full blocks of "
            f"{block_size} tokens, the last token not counted, and this prompt has none; leave the header "
            f"out or send at least {block_size + 1} tokens",
            param="X-Baton-Plan",
        )
    usable, obstacle = _usable_prefill(request, workers, decode)
    if forced is Forced.DISAGGREGATED:
        if obstacle is not None:
            why = _WHY_NOT[obstacle]
            if obstacle is Reason.NO_COMPATIBLE_PREFILL:
                why += _first_difference(decode, workers)
            raise Unavailable(f"X-Baton-Plan: disaggregated is not possible: {why}")
        return _cheapest(request, usable, rng), Reason.FORCED_DISAGGREGATED
    if obstacle is not None:
        return None, obstacle
    if shareable == 0 or shareable < min_remote_tokens:
        return None, Reason.SHORT_PROMPT
    return _cheapest(request, usable, rng), Reason.LONG_PROMPT


def _usable_prefill(
    request: RequestFacts, workers: Sequence[WorkerView], decode: WorkerView
) -> tuple[list[WorkerView], Reason | None]:
    """The prefill workers that can build this prompt for `decode`, or why there is none."""
    if not workers:
        return [], Reason.NO_PREFILL_WORKER
    compatible = [worker for worker in workers if worker.fingerprint == decode.fingerprint]
    if not compatible:
        return [], Reason.NO_COMPATIBLE_PREFILL
    blocks = num_shareable_blocks(request.num_prompt_tokens, decode.fingerprint.block_size)
    fitting = [worker for worker in compatible if worker.total_blocks >= blocks]
    if not fitting:
        return [], Reason.PROMPT_EXCEEDS_PREFILL_POOL
    return fitting, None


def _first_difference(decode: WorkerView, prefill: Sequence[WorkerView]) -> str:
    """What keeps the first incompatible prefill worker from helping; "" when all are compatible."""
    for worker in prefill:
        if difference := decode.fingerprint.difference(worker.fingerprint):
            field, ours, theirs = difference
            return f" ({field} is {theirs!r} on {worker.worker_id}, {ours!r} on {decode.worker_id})"
    return ""
