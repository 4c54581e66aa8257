"""How many more tries the whole fleet is asked for, so that one that dies is not hammered. No clock.

The first resume of a request is its own: all streams that a worker held go on when it dies. What goes beyond
is taken from a budget that all requests share: a floor and a share of the requests of the last minute.
However the workers fail, they get at most 2 + SHARE times the requests, and FLOOR a minute.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

SHARE = 0.2
FLOOR = 10
WINDOW_S = 60


@dataclass(slots=True)
class _Second:
    """What happened in one second."""

    at: int
    requests: int = 0
    retries: int = 0


@dataclass(slots=True)
class RetryBudget:
    """Requests and further resumes of the last WINDOW_S; each call is told the time, in seconds."""

    share: float = SHARE
    floor: int = FLOOR
    _seconds: deque[_Second] = field(default_factory=deque)
    _requests: int = 0
    _retries: int = 0

    def began(self, now: float) -> None:
        """A request was sent for the first time."""
        self._second(now).requests += 1
        self._requests += 1

    def spend(self, now: float) -> bool:
        """Take one more try out of the budget; False when none is left."""
        second = self._second(now)
        if self._retries >= self.floor + self.share * self._requests:
            return False
        second.retries += 1
        self._retries += 1
        return True

    def _second(self, now: float) -> _Second:
        """The present one; those that are too long ago are dropped."""
        while self._seconds and self._seconds[0].at <= now - WINDOW_S:
            gone = self._seconds.popleft()
            self._requests -= gone.requests
            self._retries -= gone.retries
        if not self._seconds or self._seconds[-1].at != int(now):
            self._seconds.append(_Second(int(now)))
        return self._seconds[-1]
