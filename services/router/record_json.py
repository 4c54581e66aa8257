"""What `/v1/requests/{id}` says of a request: the values, how they are made from its record.

Times are milliseconds, null where nothing was measured. Neither prompt nor answer is in here, nor a token of
them.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import islice
from typing import Literal

from core.request import PlanKind
from planning.estimate import Option
from planning.plan import Plan, Reason
from planning.recovery import Resume
from services.router.judge import Ending, Result
from services.router.record import Record, ms

MAX_CANDIDATES = 16
"""Of one plan that are kept, the best and the chosen one: a large fleet has thousands."""


State = Ending | Literal["running"]


@dataclass(frozen=True, slots=True)
class TargetTimes:
    """What the client, or the server for it, wants; null = no target."""

    ttft_ms: float | None
    itl_ms: float | None


@dataclass(frozen=True, slots=True)
class Verdicts:
    """Whether each target was kept, null where there is none or nothing can be said. `all`: every one of
    them."""

    ttft: Result | None
    itl: Result | None
    all: Result | None


@dataclass(slots=True)
class Candidate:
    """Workers that were looked at, and what the request was expected to take there.

    `ttft_ms` is the sum of wait, prefill, load and transfer. `harm_ms`: by which the streams that decode
    there would be held up, all together. `cost_ms`: what candidates were compared by. `meets`: the targets.
    """

    plan: PlanKind
    decode: str
    prefill: str | None
    chosen: bool
    cached_tokens: int
    wait_ms: float
    prefill_ms: float
    load_ms: float
    transfer_ms: float
    ttft_ms: float
    itl_ms: float
    harm_ms: float
    cost_ms: float
    meets: bool


@dataclass(frozen=True, slots=True)
class PlanRecord:
    """Of the first prompt. `candidates`: the best first, with the chosen one always; `num_candidates`
    were looked at."""

    kind: PlanKind
    reason: Reason
    decode: str
    prefill: str | None
    num_candidates: int
    candidates: list[Candidate]


@dataclass(frozen=True, slots=True)
class Times:
    """What it really took. `router_ms`: until the plan.

    `queue_ms`: in the decode worker's queue. `prefill_ms`: from there to the first token, with loads from
    tiers and the handoff. `transfer_ms`: of that, pulling KV from a prefill worker; `transfer_exposed_ms`: as
    far as computing there did not hide it; `last_block_to_token_ms`: after the last block;
    `remote_queue_ms`: that the prefill worker let it wait, a part of `prefill_ms`. Of several prompts
    the longest of each. `planned_ttft_ms`: from the plan to the first token, what a candidate's `ttft_ms`
    predicts; `ttft_ms`: from the request to the first token. `itl_ms`: the mean over all tokens after a
    choice's first.
    """

    router_ms: float | None
    queue_ms: float | None
    prefill_ms: float | None
    transfer_ms: float | None
    transfer_exposed_ms: float | None
    last_block_to_token_ms: float | None
    remote_queue_ms: float | None
    planned_ttft_ms: float | None
    ttft_ms: float | None
    itl_ms: float | None
    itl_p99_ms: float | None
    itl_max_ms: float | None
    total_ms: float
    tokens_per_second: float | None


@dataclass(frozen=True, slots=True)
class TokensBySource:
    """Prompt tokens by where their KV came from; they add up once the first token has come. `cached`: on the
    decode worker. `remote`: from a prefill worker, which had `remote_cached` of them already. `tiers`: by
    name."""

    cached: int
    tiers: dict[str, int]
    remote: int
    remote_cached: int
    computed: int


@dataclass(frozen=True, slots=True)
class RequestRecord:
    """A request, running or over. `key`: the name of its API key. `http_status` and `error` are null while it
    runs; `error` is a code.

    `ttft_error_ratio`: |predicted - real| / real of the time from the plan to the first token, for requests
    with one prompt. `source_plan`: which sources of KV the decode worker chose, with the seconds expected of
    each. `resumes`: each time that a prompt lost its decode worker, or was refused there, and went on
    elsewhere.
    """

    id: str
    client_request_id: str
    key: str
    model: str
    created: int
    state: State
    http_status: int | None
    error: str | None
    finish_reason: str | None
    num_prompts: int
    num_choices: int
    prompt_tokens: int
    completion_tokens: int
    targets: TargetTimes
    slo: Verdicts
    plan: PlanRecord | None
    ttft_error_ratio: float | None
    times: Times
    tokens_by_source: TokensBySource
    source_plan: str | None
    source_error: str | None
    resumes: list[Resume]


def state(record: Record) -> State:
    return "running" if record.ended_at is None else record.ending


def describe(record: Record) -> RequestRecord:
    """A record as it is now."""
    over = record.ended_at is not None
    verdict = record.verdict if over else None
    error = record.estimate_error
    return RequestRecord(
        id=record.request_id,
        client_request_id=record.client_request_id,
        key=record.key,
        model=record.model,
        created=record.created,
        state=state(record),
        http_status=record.http_status if over else None,
        error=record.error,
        finish_reason=record.finish_reason,
        num_prompts=record.num_prompts,
        num_choices=record.num_choices,
        prompt_tokens=record.prompt_tokens,
        completion_tokens=record.completion_tokens,
        targets=TargetTimes(ms(record.targets.ttft_s or None), ms(record.targets.itl_s or None)),
        slo=Verdicts(verdict.ttft, verdict.itl, verdict.all) if verdict else Verdicts(None, None, None),
        plan=record.plan and _describe_plan(record.plan),
        ttft_error_ratio=round(error.ratio, 4) if error else None,
        times=_times(record),
        tokens_by_source=_tokens(record),
        source_plan=record.source_plan,
        source_error=record.source_error,
        resumes=record.resumes,
    )


def _describe_plan(plan: Plan) -> PlanRecord:
    kept = list(islice(plan.options, MAX_CANDIDATES))
    if plan.chosen not in kept:
        kept[-1] = plan.chosen
    return PlanRecord(
        kind=plan.kind,
        reason=plan.reason,
        decode=plan.decode.worker_id,
        prefill=plan.prefill.worker_id if plan.prefill else None,
        num_candidates=len(plan.options),
        candidates=[_candidate(option, option == plan.chosen) for option in kept],
    )


def _candidate(option: Option, chosen: bool) -> Candidate:
    e = option.estimate
    return Candidate(
        plan=option.kind,
        decode=option.decode,
        prefill=option.prefill,
        chosen=chosen,
        cached_tokens=option.cached_tokens,
        wait_ms=_to_ms(e.wait_s),
        prefill_ms=_to_ms(e.prefill_s),
        load_ms=_to_ms(e.load_s),
        transfer_ms=_to_ms(e.transfer_s),
        ttft_ms=_to_ms(e.ttft_s),
        itl_ms=_to_ms(e.itl_s),
        harm_ms=_to_ms(e.harm_s),
        cost_ms=_to_ms(e.cost_s),
        meets=e.meets,
    )


def _to_ms(seconds: float) -> float:
    return round(seconds * 1000, 3)


def _times(record: Record) -> Times:
    gathered = record.gathered
    return Times(
        router_ms=ms(record.router_s),
        queue_ms=ms(record.queue_s),
        prefill_ms=ms(max((g.prefill_s for g in gathered), default=None)),
        transfer_ms=ms(record.transfer_s),
        transfer_exposed_ms=ms(max((g.transfer_exposed_s for g in gathered), default=None)),
        last_block_to_token_ms=ms(max((g.last_block_to_token_s for g in gathered), default=None)),
        remote_queue_ms=ms(max((g.remote_queue_s for g in gathered), default=None)),
        planned_ttft_ms=ms(record.planned_ttft_s),
        ttft_ms=ms(record.ttft_s),
        itl_ms=ms(record.itl_s),
        itl_p99_ms=ms(record.gaps.quantile(0.99)),
        itl_max_ms=ms(record.gaps.max_s or None),
        total_ms=_to_ms(record.elapsed_s),
        tokens_per_second=record.tokens_per_second,
    )


def _tokens(record: Record) -> TokensBySource:
    gathered = record.gathered
    sources = record.sources()
    cached, remote_cached = sources.pop("decode"), sources.pop("prefill")
    return TokensBySource(
        cached=cached,
        tiers=sources,
        remote=sum(g.remote_tokens for g in gathered),
        remote_cached=remote_cached,
        computed=sum(g.computed_tokens for g in gathered),
    )
