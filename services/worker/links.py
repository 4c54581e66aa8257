"""How fast KV comes from each prefill worker, as this worker's pulls have measured it."""

from __future__ import annotations

from collections import OrderedDict

from planning.price import LINK_GUESS_NBYTES_PER_S

MAX_LINKS = 64
"""Peers that are remembered, those pulled from last: each State carries them."""

KEPT = 0.8
"""What older pulls count after each new one."""


class Links:
    """By a prefill worker's incarnation. Bytes over seconds, so a pull counts as much as it moved."""

    def __init__(self) -> None:
        self._moved: OrderedDict[str, tuple[float, float]] = OrderedDict()

    def pulled(self, incarnation: str, nbytes: int, seconds: float) -> None:
        if nbytes <= 0 or seconds <= 0:
            return
        before_nbytes, before_s = self._moved.pop(incarnation, (0.0, 0.0))
        self._moved[incarnation] = (KEPT * before_nbytes + nbytes, KEPT * before_s + seconds)
        if len(self._moved) > MAX_LINKS:
            self._moved.popitem(last=False)

    def rate(self, incarnation: str) -> float:
        """Bytes per second; of one that was never pulled from, as planning guesses it."""
        nbytes, seconds = self._moved.get(incarnation, (LINK_GUESS_NBYTES_PER_S, 1.0))
        return nbytes / seconds

    def rates(self) -> dict[str, float]:
        return {incarnation: nbytes / seconds for incarnation, (nbytes, seconds) in self._moved.items()}
