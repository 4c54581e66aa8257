"""One record a request: what it was, where it ran, how long each part took. Never what it said."""

from __future__ import annotations

import uuid
from dataclasses import dataclass, field

from core import log
from core.clock import Clock, monotonic
from core.request import Gathered
from planning.plan import Plan

logger = log.get("router.request")


@dataclass(slots=True)
class Record:
    """Filled in as the request goes; `write` logs it at INFO. `request_id` is ours, in every answer's id."""

    client_request_id: str
    model: str
    clock: Clock = monotonic
    request_id: str = field(default_factory=lambda: uuid.uuid4().hex)
    began_at: float = field(init=False)
    first_token_at: float | None = None
    prompt_tokens: int = 0
    completion_tokens: int = 0
    plan: Plan | None = None
    gathered: list[Gathered] = field(default_factory=list)
    finish_reasons: list[str] = field(default_factory=list)
    http_status: int = 200
    error: str | None = None

    def __post_init__(self) -> None:
        self.began_at = self.clock()

    @property
    def elapsed_s(self) -> float:
        return self.clock() - self.began_at

    def write(self) -> None:
        total_s = self.elapsed_s
        first_s = None if self.first_token_at is None else self.first_token_at - self.began_at
        plan = self.plan
        logger.info(
            "request.done" if self.error is None else "request.failed",
            request_id=self.request_id,
            client_request_id=self.client_request_id,
            model=self.model,
            prompt_tokens=self.prompt_tokens,
            completion_tokens=self.completion_tokens,
            cached_tokens=self._sources(),
            queue_time_ms=_ms(max((g.queue_s for g in self.gathered), default=None)),
            time_to_first_token_ms=_ms(first_s),
            kv_transfer_ms=_ms(max((g.transfer_s for g in self.gathered), default=None)),
            total_time_ms=_ms(total_s),
            tokens_per_second=round(self.completion_tokens / total_s, 2) if total_s > 0 else None,
            finish_reason=",".join(sorted(set(self.finish_reasons))) or None,
            http_status=self.http_status,
            error=self.error,
            plan=plan.kind.value if plan else None,
            plan_reason=plan.reason.value if plan else None,
            source_plan=next((g.source_plan for g in self.gathered if g.source_plan), None),
            source_error=next((g.source_error for g in self.gathered if g.source_error), None),
            prefill_worker=plan.prefill.worker_id if plan and plan.prefill else None,
            decode_worker=plan.decode.worker_id if plan else None,
        )

    def _sources(self) -> dict[str, int]:
        """Prompt tokens that nobody had to compute, by where they were."""
        found = {
            "decode": sum(g.cached_tokens for g in self.gathered),
            "prefill": sum(g.remote_cached_tokens for g in self.gathered),
        }
        for tier, tokens in (entry for g in self.gathered for entry in g.tier_tokens):
            found[tier] = found.get(tier, 0) + tokens
        return found


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds * 1000, 2)
