"""What one try of a prompt adds to its workers, from when it is sent until it is over.

The router counts it before any State does, and no longer than it lasts: its own requests it knows best.
"""

from __future__ import annotations

from collections.abc import Mapping

from core.clock import Clock
from core.request import Gathered
from planning.plan import Plan
from planning.worker_view import Sent
from services.router.roster import Roster


class Placed:
    """`has_begun`: its first token has come, or it is over."""

    def __init__(self, roster: Roster, request_id: str, plan: Plan, num_choices: int, clock: Clock) -> None:
        """It was sent just now, to generate so many choices."""
        self.has_begun = False
        self._roster, self._id, self._decode = roster, request_id, plan.decode.incarnation
        self._clock, self._sent_at = clock, clock()
        decode = plan.work[self._decode]
        self._work = {**plan.work, self._decode: decode.times(num_choices)}
        self._choice = Sent(1, 0, decode.context_tokens)
        roster.assigned(request_id, self._work)

    def began(self, gathered: Gathered | None) -> None:
        """Its first token has come: its prompt is computed, wherever that was. What its worker does not count
        of the time until then is the way there and back."""
        self.has_begun = True
        decode = self._work[self._decode]
        self._end({**self._work, self._decode: Sent(tokens=decode.tokens)})
        self._work = {self._decode: Sent(decode.sequences, 0, decode.context_tokens)}
        if gathered is not None:
            way_s = self._clock() - self._sent_at - gathered.queue_s - gathered.prefill_s
            self._roster.answered(self._decode, max(0.0, way_s))

    def choice_over(self) -> None:
        """One of its choices generates no more."""
        if self._work:
            self._end({self._decode: self._choice})
            self._work[self._decode] = self._work[self._decode].less(self._choice)

    def over(self) -> None:
        """Nothing of it is left there. Idempotent."""
        work, self._work, self.has_begun = self._work, {}, True
        self._end(work)

    def _end(self, work: Mapping[str, Sent]) -> None:
        self._roster.ended(self._id, work)
