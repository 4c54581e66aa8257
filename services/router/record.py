"""One record a request: what it was, where it ran, how long each part took. Never what it said."""

from __future__ import annotations

import math
import time
import uuid
from array import array
from dataclasses import dataclass, field

from core import log
from core.clock import Clock, monotonic
from core.request import Gathered
from planning.estimate import Targets
from planning.plan import Plan
from planning.recovery import Resume
from services.router.judge import Course, Ending, EstimateError, Verdict, estimate_error, judge

CLIENT_CLOSED_REQUEST = 499
"""nginx's number for an answer that nobody waited for; never sent."""

MAX_GAPS = 4096
"""Of one request that its percentile is taken from, 16 KiB; later ones count in mean and maximum only."""

logger = log.get("router.request")


@dataclass(slots=True)
class Gaps:
    """Seconds between the tokens of each choice, as they reach the router; of several that come at once, each
    is taken to have come in its share of the time."""

    total_s: float = 0.0
    max_s: float = 0.0
    first: array[float] = field(default_factory=lambda: array("f"))

    def add(self, gap_s: float, num_tokens: int = 1) -> None:
        """So many tokens came, each so long after the one before."""
        self.total_s += gap_s * num_tokens
        self.max_s = max(self.max_s, gap_s)
        self.first.extend([gap_s] * min(num_tokens, MAX_GAPS - len(self.first)))

    def quantile(self, share: float) -> float | None:
        """The smallest gap that `share` of them do not exceed; None without any."""
        if not self.first:
            return None
        return sorted(self.first)[max(0, math.ceil(share * len(self.first)) - 1)]


@dataclass(slots=True)
class Record:
    """Filled in as the request goes; `write` logs it at INFO. `request_id` is ours, in every answer's id.

    `key`: the name of the API key, "" where keys have none. `created`: Unix time. Everything that ends in
    `_at` is of `clock`; `ended_at` None = it still runs. `begun`: choices of which a token has come. `plan`
    is that of the first prompt.
    """

    client_request_id: str
    model: str
    key: str = ""
    targets: Targets = field(default_factory=Targets)
    clock: Clock = monotonic
    request_id: str = field(default_factory=lambda: uuid.uuid4().hex)
    created: int = field(default_factory=lambda: int(time.time()))
    began_at: float = field(init=False)
    planned_at: float | None = None
    first_token_at: float | None = None
    ended_at: float | None = None
    gaps: Gaps = field(default_factory=Gaps)
    num_prompts: int = 0
    num_choices: int = 0
    begun: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    plan: Plan | None = None
    gathered: list[Gathered] = field(default_factory=list)
    resumes: list[Resume] = field(default_factory=list)
    finish_reasons: list[str] = field(default_factory=list)
    http_status: int = 200
    error: str | None = None

    def __post_init__(self) -> None:
        self.began_at = self.clock()

    @property
    def elapsed_s(self) -> float:
        return (self.clock() if self.ended_at is None else self.ended_at) - self.began_at

    @property
    def ttft_s(self) -> float | None:
        """As the client sees it."""
        return None if self.first_token_at is None else self.first_token_at - self.began_at

    @property
    def planned_ttft_s(self) -> float | None:
        """From the plan to the first token."""
        if self.first_token_at is None or self.planned_at is None:
            return None
        return self.first_token_at - self.planned_at

    @property
    def router_s(self) -> float | None:
        """Until the plan: the body, its tokens, waiting for a place."""
        return None if self.planned_at is None else self.planned_at - self.began_at

    @property
    def itl_s(self) -> float | None:
        """The mean over all choices; None with fewer than two tokens of any."""
        after_first = self.completion_tokens - self.begun
        return self.gaps.total_s / after_first if after_first > 0 else None

    @property
    def ending(self) -> Ending:
        """Of a request that is over."""
        if self.error is None:
            return Ending.ANSWERED
        if self.http_status == CLIENT_CLOSED_REQUEST:
            return Ending.LEFT
        return Ending.REFUSED if 400 <= self.http_status < 500 and self.http_status != 429 else Ending.FAILED

    @property
    def verdict(self) -> Verdict:
        """Of a request that is over."""
        return judge(self.targets, Course(self.ending, self.elapsed_s, self.ttft_s, self.itl_s))

    @property
    def predicted_s(self) -> float | None:
        """From the plan to the first token, as planned; of a request with one prompt."""
        return self.plan.chosen.estimate.ttft_s if self.plan and self.num_prompts == 1 else None

    @property
    def estimate_error(self) -> EstimateError | None:
        """None until a token has come, and where nothing was predicted or a worker was lost before."""
        if self.predicted_s is None or self.planned_ttft_s is None or self.resumes:
            return None
        return estimate_error(self.predicted_s, self.planned_ttft_s)

    @property
    def finish_reason(self) -> str | None:
        """Of all choices, without repetition."""
        return ",".join(sorted(set(self.finish_reasons))) or None

    @property
    def queue_s(self) -> float | None:
        """In the decode worker's queue, of the prompt that waited longest."""
        return max((g.queue_s for g in self.gathered), default=None)

    @property
    def transfer_s(self) -> float | None:
        return max((g.transfer_s for g in self.gathered), default=None)

    def sources(self) -> dict[str, int]:
        """Prompt tokens that nobody had to compute, by where they were."""
        found = {
            "decode": sum(g.cached_tokens for g in self.gathered),
            "prefill": sum(g.remote_cached_tokens for g in self.gathered),
        }
        for tier, tokens in (entry for g in self.gathered for entry in g.tier_tokens):
            found[tier] = found.get(tier, 0) + tokens
        return found

    @property
    def source_plan(self) -> str | None:
        return next((g.source_plan for g in self.gathered if g.source_plan), None)

    @property
    def source_error(self) -> str | None:
        return next((g.source_error for g in self.gathered if g.source_error), None)

    def write(self) -> None:
        total_s, plan = self.elapsed_s, self.plan
        logger.info(
            "request.done" if self.error is None else "request.failed",
            request_id=self.request_id,
            client_request_id=self.client_request_id,
            key=self.key or None,
            model=self.model,
            prompt_tokens=self.prompt_tokens,
            completion_tokens=self.completion_tokens,
            cached_tokens=self.sources(),
            queue_time_ms=ms(self.queue_s),
            time_to_first_token_ms=ms(self.ttft_s),
            predicted_ttft_ms=ms(self.predicted_s),
            inter_token_latency_ms=ms(self.itl_s),
            kv_transfer_ms=ms(self.transfer_s),
            total_time_ms=ms(total_s),
            tokens_per_second=self.tokens_per_second,
            slo=self.verdict.all,
            finish_reason=self.finish_reason,
            http_status=self.http_status,
            error=self.error,
            plan=plan.kind.value if plan else None,
            plan_reason=plan.reason.value if plan else None,
            source_plan=self.source_plan,
            source_error=self.source_error,
            prefill_worker=plan.prefill.worker_id if plan and plan.prefill else None,
            decode_worker=plan.decode.worker_id if plan else None,
            resumes=len(self.resumes),
            resume_reasons=",".join(sorted({each.cause.value for each in self.resumes})) or None,
        )

    @property
    def tokens_per_second(self) -> float | None:
        return round(self.completion_tokens / self.elapsed_s, 2) if self.elapsed_s > 0 else None


def ms(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds * 1000, 3)
