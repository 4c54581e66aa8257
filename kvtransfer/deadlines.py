"""How long an operation of a tier may take: not longer than its size allows, and never without progress."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable

from core.clock import monotonic

MIN_NBYTES_PER_S = 128 * 2**20
"""A tier slower than this costs more than it saves; its operations are cut off."""


def whole_s(stall_s: float, nbytes: int) -> float:
    """Seconds for an operation over `nbytes` in all, even with progress."""
    return stall_s + nbytes / MIN_NBYTES_PER_S


async def finish(
    futures: Iterable[asyncio.Future], stall_s: float, nbytes: int, progress: Callable[[], int]
) -> bool:
    """Wait until all are done; False when `progress()` did not change for `stall_s` seconds, or they
    took longer than `whole_s` in all. They are not cancelled."""
    pending = set(futures)
    started = seen_at = monotonic()
    seen = progress()
    while pending:
        now = monotonic()
        if progress() != seen:
            seen, seen_at = progress(), now
        left = min(seen_at + stall_s, started + whole_s(stall_s, nbytes)) - now
        if left <= 0:
            return False
        _, pending = await asyncio.wait(pending, timeout=min(left, stall_s / 4))
    return True
