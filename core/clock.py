"""Time, injectable. Only durations and monotonic instants; absolute times never cross a process."""

from __future__ import annotations

import time
from collections.abc import Callable

Clock = Callable[[], float]
"""Returns monotonic seconds."""

monotonic: Clock = time.monotonic


class AwakeClock:
    """Seconds in which somebody was there to look: between two readings no more than `at_most_s` count. Where
    it is read that often, time in which the process or its loop stood still is left out, and nobody else is
    blamed for it."""

    def __init__(self, at_most_s: float, clock: Clock = monotonic) -> None:
        self._at_most_s, self._clock = at_most_s, clock
        self._read_at, self._now = clock(), 0.0

    def __call__(self) -> float:
        now = self._clock()
        self._now += min(now - self._read_at, self._at_most_s)
        self._read_at = now
        return self._now


class FakeClock:
    """A clock that moves only when told to."""

    def __init__(self, now: float = 0.0) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now

    def advance(self, seconds: float) -> None:
        self.now += seconds
