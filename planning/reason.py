"""Why a plan is what it is, in one word of a short list."""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum

from planning.price import HARM, Ask, Priced
from planning.worker_view import WorkerView


class Reason(StrEnum):
    """A metric label and a response header; docs/api.md says what each one means."""

    CHEAPEST_PAIR = "cheapest_pair"
    CHEAPEST_LOCAL = "cheapest_local"
    SHORT_PROMPT = "short_prompt"
    PREFIX_ON_DECODE = "prefix_on_decode"
    PREFILL_BUSY = "prefill_busy"
    SLOW_TRANSFER = "slow_transfer"
    KEEPS_TARGETS = "keeps_targets"
    MISSES_TARGETS = "misses_targets"
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


def why_this(
    ask: Ask,
    chosen: Priced,
    locals_: Sequence[Priced],
    pairs: Sequence[Priced],
    prefill: Sequence[WorkerView],
    at_least: int,
) -> Reason:
    """Of a plan that nobody forced. `prefill`: the workers of that role, `at_least`: tokens that one is asked
    for."""
    if chosen.prefill is None:
        if obstacle := _obstacle(ask, prefill, chosen.decode.worker):
            return obstacle
        if ask.shareable < at_least:
            return Reason.SHORT_PROMPT
        if ask.shareable - chosen.decode.cached < at_least:
            return Reason.PREFIX_ON_DECODE
    if not chosen.meets:
        return Reason.MISSES_TARGETS
    if chosen.cost_s > min(way.cost_s for way in (*locals_, *pairs)):
        return Reason.KEEPS_TARGETS
    if chosen.prefill is not None:
        return Reason.CHEAPEST_PAIR
    return _why_local(chosen, pairs)


def _why_local(chosen: Priced, pairs: Sequence[Priced]) -> Reason:
    """What makes computing everything on the decode worker cheaper than the cheapest pair."""
    if not pairs:
        return Reason.CHEAPEST_LOCAL
    ours, pair = chosen.decode, min(pairs, key=lambda way: way.cost_s)
    spared_s = (ours.whole_s - ours.compute_s) * (1 + HARM * ours.streams)
    if chosen.cost_s + spared_s > pair.cost_s:
        return Reason.PREFIX_ON_DECODE
    if pair.cost_s - max(0.0, pair.wait_s - chosen.wait_s) < chosen.cost_s:
        return Reason.PREFILL_BUSY
    if pair.cost_s - pair.transfer_s < chosen.cost_s:
        return Reason.SLOW_TRANSFER
    return Reason.CHEAPEST_LOCAL


def why_no_pair(ask: Ask, prefill: Sequence[WorkerView], decode: WorkerView) -> str:
    """Why no prefill worker can build the prompt for `decode`, for a person."""
    obstacle = _obstacle(ask, prefill, decode)
    assert obstacle is not None
    if obstacle is Reason.NO_COMPATIBLE_PREFILL:
        return _WHY_NOT[obstacle] + _first_difference(decode, prefill)
    return _WHY_NOT[obstacle]


def alike(decode: WorkerView, prefill: WorkerView) -> bool:
    """Whether the one can use the other's blocks."""
    ours, theirs = decode.fingerprint, prefill.fingerprint
    return ours is theirs or ours == theirs


def can_build(ask: Ask, prefill: WorkerView) -> bool:
    """Whether its pool holds all of the prompt's full blocks."""
    return prefill.total_blocks * prefill.fingerprint.block_size >= ask.shareable


def _obstacle(ask: Ask, prefill: Sequence[WorkerView], decode: WorkerView) -> Reason | None:
    """Why none of these can build the prompt for `decode`; None where one can."""
    if not prefill:
        return Reason.NO_PREFILL_WORKER
    compatible = [worker for worker in prefill if alike(decode, worker)]
    if not compatible:
        return Reason.NO_COMPATIBLE_PREFILL
    if not any(can_build(ask, worker) for worker in compatible):
        return Reason.PROMPT_EXCEEDS_PREFILL_POOL
    return None


def _first_difference(decode: WorkerView, prefill: Sequence[WorkerView]) -> str:
    """What keeps the first incompatible prefill worker from helping; "" when all are compatible."""
    for worker in prefill:
        if difference := decode.fingerprint.difference(worker.fingerprint):
            field, ours, theirs = difference
            return f" ({field} is {theirs!r} on {worker.worker_id}, {ours!r} on {decode.worker_id})"
    return ""
