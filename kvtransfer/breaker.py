"""A circuit breaker as a pure state machine: when to leave a faulty thing alone, and when to try again.

    state       admit()                      succeeded()   failed()                   cancelled()
    closed      GO                           -             open for a back-off        -
    open        REFUSE, until it is over;    -             -  (begun before it        -
                then PROBE -> half-open                       opened)
    half-open   REFUSE                       closed        open, twice as long        open, PROBE at once

One failure opens it: operations are bounded by a deadline each, so every further try would cost its
caller that deadline again. A failure soon after closing continues the back-off where it stood, so
something that answers probes and fails at work is not retried every half second for ever.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from enum import Enum

from core.clock import Clock, monotonic

BASE_S = 0.5
CAP_S = 30.0


class Verdict(Enum):
    GO = "go"
    PROBE = "probe"
    """The back-off is over: the caller alone tries, and then reports how it went."""
    REFUSE = "refuse"


def back_off_s(streak: int, spread: float) -> float:
    """Seconds to wait after the `streak`-th failure in a row (from 1): BASE_S doubled each time up to
    CAP_S, then shortened by up to half as `spread` goes from 1 to 0, so that workers do not return
    together."""
    doubled = BASE_S * 2 ** min(streak - 1, 16)  # beyond the cap long before
    return min(doubled, CAP_S) * (0.5 + spread / 2)


class Breaker:
    """All calls from one thread; `state` may be read from any. `spread`: random in [0, 1)."""

    def __init__(self, clock: Clock = monotonic, spread: Callable[[], float] = random.random) -> None:
        self._clock = clock
        self._spread = spread
        self.state = "closed"
        """`closed`, `open` or `half-open`."""
        self._streak = 0
        self._closed_at = float("-inf")
        self._retry_at = 0.0

    @property
    def refuses(self) -> bool:
        """Whether `admit` would answer REFUSE now. Changes nothing."""
        return self.state == "half-open" or (self.state == "open" and self._clock() < self._retry_at)

    def admit(self) -> Verdict:
        """May an operation start now? After PROBE the caller must report, or it stays half-open."""
        if self.state == "closed":
            return Verdict.GO
        if self.refuses:
            return Verdict.REFUSE
        self.state = "half-open"
        return Verdict.PROBE

    def succeeded(self) -> bool:
        """An operation went well; True when this closed the breaker."""
        if self.state != "half-open":
            return False
        self.state = "closed"
        self._closed_at = self._clock()
        return True

    def failed(self) -> bool:
        """An operation failed or ran into its deadline; True when this opened a closed breaker."""
        if self.state == "open":
            return False
        was_closed = self.state == "closed"
        relapse = not was_closed or self._clock() - self._closed_at < CAP_S
        self._streak = self._streak + 1 if relapse else 1
        self.state = "open"
        self._retry_at = self._clock() + back_off_s(self._streak, self._spread())
        return was_closed

    def cancelled(self) -> None:
        """An operation was given up by its caller, which says nothing; the next one may probe instead."""
        if self.state == "half-open":
            self.state = "open"
            self._retry_at = self._clock()
