"""What a request's course means for the metrics and its record."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from core.clock import Clock, monotonic
from core.errors import BatonError
from planning.estimate import Targets
from services.router.choice import Piece
from services.router.judge import Ending, Result
from services.router.metrics import RouterMetrics
from services.router.record import CLIENT_CLOSED_REQUEST, Record
from services.router.records import Records

if TYPE_CHECKING:
    from services.router.generation import Generation, Part


class Progress:
    """Told of each event of one request, from before it has a place; `close` judges it and writes its
    record."""

    def __init__(
        self, metrics: RouterMetrics, records: Records, record: Record, clock: Clock = monotonic
    ) -> None:
        self.record = record
        self._metrics = metrics
        self._records = records
        self._clock = clock
        self._last_at: dict[int, float] = {}
        self._sent = False
        self._itl = metrics.itl.labels(record.model)  # once: looking it up takes longer than observing
        self._tokens = metrics.generation_tokens.labels(record.model)
        records.began(record)

    def planned(self, generation: Generation) -> None:
        """Its prompts are planned; a later plan, after it has waited, takes the place of this one."""
        record, parts = self.record, generation.parts
        record.planned_at, record.plan = self._clock(), parts[0].plan
        record.num_prompts, record.num_choices = len(parts), sum(len(part.choices) for part in parts)
        record.prompt_tokens, record.resumes = generation.num_prompt_tokens, generation.resumes

    def started(self) -> None:
        """Its prompts are sent."""
        self._sent = True
        self._metrics.prompt_tokens.labels(self.record.model).inc(self.record.prompt_tokens)

    def took(self, generation: Generation, pieces: Iterable[tuple[Part, Piece]]) -> None:
        """Deltas arrived."""
        now, record = self._clock(), self.record
        generated = generation.num_generated_tokens
        self._tokens.inc(generated - record.completion_tokens)
        record.completion_tokens = generated
        if record.first_token_at is None:
            record.first_token_at = now
            self._first_token(generation)
        for _, piece in pieces:
            if piece.num_generated:
                self._came(piece.index, piece.num_generated, now)
            if piece.finish_reason is not None:
                record.finish_reasons.append(piece.finish_reason)
                self._metrics.finished.labels(piece.finish_reason).inc()

    def _came(self, index: int, num_tokens: int, now: float) -> None:
        """So many tokens of a choice, at once. With the first one of all nothing is measured."""
        last_at = self._last_at.get(index, now)
        if index not in self._last_at:
            self.record.begun += 1
            num_tokens -= 1
        self._last_at[index] = now
        if num_tokens:
            gap_s = (now - last_at) / num_tokens
            self.record.gaps.add(gap_s, num_tokens)
            for _ in range(num_tokens):
                self._itl.observe(gap_s)

    def _first_token(self, generation: Generation) -> None:
        record = self.record
        record.gathered = generation.gathered
        assert record.ttft_s is not None
        self._metrics.ttft.labels(record.model).observe(record.ttft_s)
        error = record.estimate_error
        if error is not None and record.plan is not None:
            plan = record.plan.kind.value
            self._metrics.ttft_error.labels(plan).observe(error.ratio)
            direction = "over" if error.bias_s > 0 else "under"
            self._metrics.ttft_bias.labels(plan, direction).inc(abs(error.bias_s))

    def ended(self, generation: Generation) -> None:
        self.record.gathered = generation.gathered

    def client_gone(self) -> None:
        self.record.http_status, self.record.error = CLIENT_CLOSED_REQUEST, "client_gone"
        self._metrics.client_gone.inc()

    def failed(self, error: BatonError) -> None:
        """Also before it was started. The first error stands."""
        if self.record.error is not None:
            return
        self.record.http_status, self.record.error = error.http_status, error.code
        if error.http_status >= 500:
            self._metrics.count_fault(error.code or "unknown")

    def close(self) -> None:
        record, metrics = self.record, self._metrics
        record.ended_at = self._clock()
        if self._sent:
            metrics.e2e.labels(record.model).observe(record.elapsed_s)
        if record.ending is not Ending.REFUSED:
            self._judge()
        self._records.ended(record)
        record.write()

    def _judge(self) -> None:
        record, targets = self.record, self.record.targets
        if targets == Targets():
            self._metrics.no_slo_requests.inc()
        for name, measured_s, target_s in (
            ("ttft", record.ttft_s, targets.ttft_s),
            ("itl", record.itl_s, targets.itl_s),
        ):
            if measured_s is not None and target_s:
                self._metrics.slo_ratio.labels(name).observe(measured_s / target_s)
        verdict = record.verdict
        results: tuple[tuple[str, Result | None], ...] = (
            ("ttft", verdict.ttft),
            ("itl", verdict.itl),
            ("all", verdict.all),
        )
        for target, result in results:
            if result is not None:
                self._metrics.slo_requests.labels(target, result.value).inc()
