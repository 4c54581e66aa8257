"""Which workers serve a request: a pure function of the request, the fleet, its targets, the client's wish.

    prompt needs logits of its own tokens    -> local
    client asked for local or disaggregated  -> that, or an error that says why not
    otherwise                                -> the cheapest plan of those that meet the targets;
                                                where none does, the one that misses by the least

`planning.price` says what each plan costs. A prefill worker can help with full blocks that end before the
last token. It is not asked for fewer tokens than `min_remote_tokens`, but a forced handoff asks it for every
one that the decode worker lacks, worth it or not; a prompt without any is an InvalidParameter.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from heapq import nsmallest
from math import ceil
from typing import NamedTuple

from core.blocks import num_shareable_blocks
from core.errors import SOON_S, ContextLengthExceeded, InvalidParameter, Unavailable
from core.request import PlanKind
from planning.estimate import Option, Targets
from planning.price import HARM, Ask, Priced, price_decode, price_local, price_pair, price_prefill
from planning.reason import Reason, alike, can_build, why_no_pair, why_this
from planning.worker_view import FleetView, Sent, WorkerView

MAX_PAIRED = 4
"""Workers of each role that are tried in pairs, each role's cheapest."""

MAX_OPTIONS = 32
"""Options that a plan keeps to explain itself by."""


class Forced(StrEnum):
    """What the client asked for in `X-Baton-Plan`."""

    AUTO = "auto"
    LOCAL = "local"
    DISAGGREGATED = "disaggregated"


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


class Remote(NamedTuple):
    """A prefill worker as priced: `core.request.PrefillTarget` has the same. `min_tokens`: it is not worth
    asking where the decode worker lacks fewer."""

    min_tokens: int
    cached_tokens: int
    token_s: float
    queue_s: float


@dataclass(frozen=True, slots=True)
class Plan:
    """`max_tokens`: how many tokens each choice may have, resolved for the chosen worker.

    `options`: what was looked at, the best MAX_OPTIONS, best first; `chosen` is one of them, the first where
    nothing was forced. `work`: what one choice brings each of its workers, by incarnation.
    `remote`: what the decode worker is told of the prefill worker.
    """

    kind: PlanKind
    decode: WorkerView
    prefill: WorkerView | None
    reason: Reason
    max_tokens: int
    chosen: Option
    options: tuple[Option, ...]
    work: Mapping[str, Sent]
    remote: Remote | None = None


def plan(
    request: RequestFacts,
    fleet: FleetView,
    forced: Forced,
    *,
    targets: Targets,
    min_remote_tokens: int,
    rng: random.Random,
) -> Plan:
    """Choose the workers of one request; of equal plans one at random.

    Raises Unavailable when no worker can take it now, ContextLengthExceeded when none ever could,
    InvalidParameter when the wish contradicts the request.
    """
    if not fleet.decode:
        raise Unavailable(
            "no decode worker is ready; try again, /v1/cluster shows their states", retry_after_s=SOON_S
        )
    workers = _with_room(request, fleet.decode)
    block_size = workers[0].fingerprint.block_size
    shareable = num_shareable_blocks(request.num_prompt_tokens, block_size) * block_size
    _check_wish(request, forced, shareable, block_size)
    ask = Ask(request.num_prompt_tokens, shareable, targets, fleet.now)
    locals_ = _locals(ask, workers, fleet)
    least = 0 if forced is Forced.DISAGGREGATED else max(1, min_remote_tokens)
    pairs = [] if request.prompt_logprobs else _pairs(ask, locals_, fleet, least, rng)
    if forced is Forced.DISAGGREGATED and not pairs:
        why = why_no_pair(ask, fleet.prefill, workers[0])
        raise Unavailable(f"X-Baton-Plan: disaggregated is not possible: {why}")
    allowed = {Forced.AUTO: locals_ + pairs, Forced.LOCAL: locals_, Forced.DISAGGREGATED: pairs}[forced]
    chosen = _best(allowed, rng)
    if forced is Forced.DISAGGREGATED:
        reason = Reason.FORCED_DISAGGREGATED
    elif request.prompt_logprobs:
        reason = Reason.NEEDS_PROMPT_LOGPROBS
    elif forced is Forced.LOCAL:
        reason = Reason.FORCED_LOCAL
    else:
        reason = why_this(ask, chosen, locals_, pairs, fleet.prefill, least)
    ways = _in_order(locals_ + pairs, chosen, forced is not Forced.AUTO)
    return _made(request, ask, chosen, reason, ways, _remote(ask, chosen, locals_, least))


def _check_wish(request: RequestFacts, forced: Forced, shareable: int, block_size: int) -> None:
    if forced is not Forced.DISAGGREGATED:
        return
    if request.prompt_logprobs:
        raise InvalidParameter(
            "echo with logprobs needs every logit of the prompt, which only the decode worker "
            "computes; leave X-Baton-Plan out or set it to local",
            param="X-Baton-Plan",
        )
    if not shareable:
        raise InvalidParameter(
            f"X-Baton-Plan: disaggregated is not possible: a prefill worker hands over full blocks of "
            f"{block_size} tokens, the last token not counted, and this prompt has none; leave the header "
            f"out or send at least {block_size + 1} tokens",
            param="X-Baton-Plan",
        )


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


def _locals(ask: Ask, workers: Sequence[WorkerView], fleet: FleetView) -> list[Priced]:
    prices = [
        price_decode(worker, ask, fleet.found.get(worker.incarnation, {}), ahead)
        for worker, ahead in _ahead(workers, fleet)
    ]
    return [price_local(price, ask) for price in prices]


def _pairs(
    ask: Ask, locals_: Sequence[Priced], fleet: FleetView, at_least: int, rng: random.Random
) -> list[Priced]:
    """Pairs of the cheapest of each role; not where the decode worker lacks fewer tokens than `at_least`."""
    decodes = [way.decode for way in locals_ if ask.shareable - way.decode.cached >= at_least]
    decodes = nsmallest(MAX_PAIRED, decodes, key=lambda price: (price.pair_cost_s, price.ahead, rng.random()))
    helpers = [
        worker
        for worker in fleet.prefill
        if can_build(ask, worker) and any(alike(each.worker, worker) for each in decodes)
    ]
    if not ask.shareable or not helpers:
        return []
    prefills = [
        price_prefill(worker, ask, fleet.found.get(worker.incarnation, {}), ahead)
        for worker, ahead in _ahead(helpers, fleet)
    ]
    prefills = nsmallest(MAX_PAIRED, prefills, key=lambda price: (price.pair_cost_s, rng.random()))
    return [
        price_pair(decode, prefill, ask)
        for decode in decodes
        for prefill in prefills
        if alike(decode.worker, prefill.worker)
    ]


def _ahead(workers: Sequence[WorkerView], fleet: FleetView) -> Iterator[tuple[WorkerView, float]]:
    """Each with how many sequences more than the least it was sent lately."""
    recent = [fleet.recent.get(worker.incarnation, 0.0) for worker in workers]
    least = min(recent)
    return ((worker, each - least) for worker, each in zip(workers, recent, strict=True))


def _best(ways: Sequence[Priced], rng: random.Random) -> Priced:
    ranks = [way.rank for way in ways]
    least = min(ranks)
    return rng.choice([way for way, rank in zip(ways, ranks, strict=True) if rank == least])


def _in_order(ways: Sequence[Priced], chosen: Priced, is_forced: bool) -> list[Priced]:
    """The best MAX_OPTIONS; `chosen` before its equals, and always among them."""
    others = nsmallest(MAX_OPTIONS - 1, (way for way in ways if way is not chosen), key=lambda way: way.rank)
    place = sum(way.rank < chosen.rank for way in others) if is_forced else 0
    return [*others[:place], chosen, *others[place:]]


def _remote(ask: Ask, chosen: Priced, locals_: Sequence[Priced], at_least: int) -> Remote | None:
    """`at_least`: missing tokens for which a prefill worker is asked at all; 0 = any, whatever it costs."""
    prefill, decode = chosen.prefill, chosen.decode
    if prefill is None:
        return None
    min_tokens, missing, new = at_least, ask.shareable - decode.cached, ask.shareable - prefill.cached
    if 0 < at_least < missing:
        # As many as cost the same on the decode worker alone. It decides by this number and by no estimate
        # of its own, which would be another one. Where the pair was chosen for the targets, as many as now.
        alone = next(way for way in locals_ if way.decode is decode)
        token_s = (decode.compute_s + decode.beside_s + HARM * alone.harm_s) / (ask.tokens - decode.cached)
        min_tokens = max(at_least, ceil(missing - max(0.0, alone.cost_s - chosen.cost_s) / token_s))
    token_s = prefill.compute_s / new if new and prefill.worker.prefill_model.num_steps else 0.0
    return Remote(max(1, min_tokens), prefill.cached, token_s, prefill.queue_s)


def _made(
    request: RequestFacts,
    ask: Ask,
    chosen: Priced,
    reason: Reason,
    ways: Sequence[Priced],
    remote: Remote | None,
) -> Plan:
    """`ways`: the options, in order."""
    decode, left = chosen.decode.worker, chosen.decode.worker.max_tokens - request.num_prompt_tokens
    rest = ask.tokens - (chosen.decode.cached if chosen.prefill is None else ask.shareable)
    work = {decode.incarnation: Sent(1, rest, ask.tokens)}
    if chosen.prefill is not None:
        work[chosen.prefill.worker.incarnation] = Sent(1, ask.shareable - chosen.prefill.cached)
    options = [way.option() for way in ways]
    option = options[next(number for number, way in enumerate(ways) if way is chosen)]
    return Plan(
        kind=option.kind,
        decode=decode,
        prefill=chosen.prefill and chosen.prefill.worker,
        reason=reason,
        max_tokens=request.max_tokens or min(left, request.default_max_tokens or left),
        chosen=option,
        options=tuple(options),
        work=work,
        remote=remote,
    )
