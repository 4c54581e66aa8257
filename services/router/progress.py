"""What a request's course means for the metrics and its record."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from core.clock import Clock, monotonic
from core.errors import BatonError
from services.router.choice import Piece
from services.router.metrics import RouterMetrics
from services.router.record import Record

if TYPE_CHECKING:
    from services.router.generation import Generation, Part

CLIENT_CLOSED_REQUEST = 499
"""nginx's number for an answer that nobody waited for; never sent."""


class Progress:
    """Told of each event of one request; `close` writes the record."""

    def __init__(
        self, metrics: RouterMetrics, model: str, client_request_id: str, clock: Clock = monotonic
    ) -> None:
        self._metrics = metrics
        self._clock = clock
        self._last_at: dict[int, float] = {}
        self.record = Record(client_request_id, model, clock)

    def started(self, generation: Generation) -> None:
        self.record.plan = generation.parts[0].plan
        self.record.prompt_tokens = generation.num_prompt_tokens
        self._metrics.prompt_tokens.labels(self.record.model).inc(generation.num_prompt_tokens)

    def took(self, generation: Generation, pieces: Iterable[tuple[Part, Piece]]) -> None:
        """Deltas arrived."""
        now, model = self._clock(), self.record.model
        generated = generation.num_generated_tokens
        self._metrics.generation_tokens.labels(model).inc(generated - self.record.completion_tokens)
        self.record.completion_tokens = generated
        if self.record.first_token_at is None:
            self.record.first_token_at = now
            self._metrics.ttft.labels(model).observe(now - self.record.began_at)
        for _, piece in pieces:
            last = self._last_at.get(piece.index)
            if last is not None:
                self._metrics.itl.labels(model).observe(now - last)
            self._last_at[piece.index] = now
            if piece.finish_reason is not None:
                self.record.finish_reasons.append(piece.finish_reason)
                self._metrics.finished.labels(piece.finish_reason).inc()

    def ended(self, generation: Generation) -> None:
        self.record.gathered = generation.gathered

    def client_gone(self) -> None:
        self.record.http_status, self.record.error = CLIENT_CLOSED_REQUEST, "client_gone"
        self._metrics.client_gone.inc()

    def failed(self, error: BatonError) -> None:
        self.record.http_status, self.record.error = error.http_status, error.code
        if error.http_status >= 500:
            self._metrics.count_fault(error.code or "unknown")

    def close(self) -> None:
        self._metrics.e2e.labels(self.record.model).observe(self.record.elapsed_s)
        self.record.write()
