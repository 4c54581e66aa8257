"""What the list `/v1/requests` says of each request; times are milliseconds."""

from __future__ import annotations

from dataclasses import dataclass

from core.request import PlanKind
from planning.plan import Reason
from services.router.judge import Result
from services.router.record import Record, ms
from services.router.record_json import State, state


@dataclass(frozen=True, slots=True)
class RequestSummary:
    """A request in a list."""

    id: str
    client_request_id: str
    created: int
    state: State
    http_status: int | None
    error: str | None
    prompt_tokens: int
    completion_tokens: int
    plan: PlanKind | None
    reason: Reason | None
    decode: str | None
    prefill: str | None
    predicted_ttft_ms: float | None
    planned_ttft_ms: float | None
    ttft_ms: float | None
    itl_ms: float | None
    total_ms: float
    slo: Result | None


@dataclass(frozen=True, slots=True)
class RequestList:
    """Newest first: those that run, then those that are over."""

    object: str
    data: list[RequestSummary]


def summarize(record: Record) -> RequestSummary:
    """A record as it is now."""
    over, plan = record.ended_at is not None, record.plan
    return RequestSummary(
        id=record.request_id,
        client_request_id=record.client_request_id,
        created=record.created,
        state=state(record),
        http_status=record.http_status if over else None,
        error=record.error,
        prompt_tokens=record.prompt_tokens,
        completion_tokens=record.completion_tokens,
        plan=plan.kind if plan else None,
        reason=plan.reason if plan else None,
        decode=plan.decode.worker_id if plan else None,
        prefill=plan.prefill.worker_id if plan and plan.prefill else None,
        predicted_ttft_ms=ms(plan.chosen.estimate.ttft_s) if plan else None,
        planned_ttft_ms=ms(record.planned_ttft_s),
        ttft_ms=ms(record.ttft_s),
        itl_ms=ms(record.itl_s),
        total_ms=ms(record.elapsed_s) or 0.0,
        slo=record.verdict.all if over else None,
    )
