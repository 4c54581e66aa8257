"""How long a tier was at work, however many operations ran at once."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from core.clock import Clock, monotonic


class BusyTime:
    """`seconds` in which at least one operation ran; two at once count once. For one thread."""

    def __init__(self, clock: Clock = monotonic) -> None:
        self._clock = clock
        self._num_running = 0
        self._since = self.seconds = 0.0

    @contextmanager
    def running(self) -> Iterator[None]:
        if not self._num_running:
            self._since = self._clock()
        self._num_running += 1
        try:
            yield
        finally:
            self._num_running -= 1
            if not self._num_running:
                self.seconds += self._clock() - self._since
