"""What a tier costs, learned from real loads: seconds = latency + bytes / bandwidth.

A line fitted to (bytes, seconds) of the last times it was busy, older ones weighing less. Bytes are all that
it brought meanwhile, for whomever: so the fit is the tier's own speed, and its queue stands apart.
"""

from __future__ import annotations

from dataclasses import dataclass

from core.clock import Clock, monotonic

_DECAY = 0.8
"""Weight of a sample once another one was seen: the last five make up two thirds."""

_NOTHING: tuple[float, ...] = (0.0, 0.0, 0.0, 0.0, 0.0)

FORGET_AFTER_S = 30.0
"""A tier that looked too slow is not asked, so it is never measured again; after this long without a load
it gets its first guess back and one more try."""


@dataclass(frozen=True, slots=True)
class Rate:
    """Price of one source now. `queued_nbytes` stand before whatever is asked next."""

    latency_s: float
    nbytes_per_s: float
    queued_nbytes: int = 0
    measured: bool = False


class RateMeter:
    """`guess` is the price before the first load. Not thread-safe; `rate` may be read from anywhere."""

    def __init__(self, guess: Rate, clock: Clock = monotonic) -> None:
        self._guess, self._clock = guess, clock
        self._measured: tuple[float, float] | None = None  # latency, bytes/s
        self._seen_at = 0.0
        self._sums = _NOTHING

    def add(self, nbytes: int, seconds: float) -> None:
        """One time it was busy: the bytes that it brought, and how long that took."""
        if nbytes <= 0 or seconds <= 0:
            return
        if self._clock() - self._seen_at > FORGET_AFTER_S:
            self._sums = _NOTHING
        x, y = float(nbytes), seconds
        fresh = (1.0, x, y, x * x, x * y)
        self._sums = tuple(_DECAY * old + new for old, new in zip(self._sums, fresh, strict=True))
        self._seen_at = self._clock()
        self._measured = _fit(*self._sums)

    def rate(self, queued_nbytes: int = 0) -> Rate:
        if self._measured is None or self._clock() - self._seen_at > FORGET_AFTER_S:
            return Rate(self._guess.latency_s, self._guess.nbytes_per_s, queued_nbytes)
        return Rate(*self._measured, queued_nbytes, measured=True)


def _fit(w: float, x: float, y: float, xx: float, xy: float) -> tuple[float, float]:
    """Latency >= 0 and bytes/s of the weighted least-squares line. Loads of about one size cannot tell
    the two apart: then everything counts as bandwidth."""
    spread = w * xx - x * x
    if spread > 0.01 * w * xx:
        slope = (w * xy - x * y) / spread
        latency_s = (y - slope * x) / w
        if slope > 0 and latency_s >= 0:
            return latency_s, 1 / slope
    return 0.0, x / y
