"""What one worker can bring without computing it, as a router knows it from the worker's events."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

TIERS = ("device", "host", "disk", "redis")
"""Cheapest first."""


@dataclass(frozen=True, slots=True)
class Changes:
    """Blocks by the first 8 bytes of their hash (`core.blocks.block_key`)."""

    tier: str
    stored: Sequence[int] = ()
    evicted: Sequence[int] = ()


class PrefixIndex:
    """Blocks by tier. A block that leaves one tier stays known as long as another holds it."""

    def __init__(self) -> None:
        self._held: dict[str, set[int]] = {}
        self._next: int | None = None

    def apply(self, first: int, next_: int, snapshot: bool, changes: Iterable[Changes]) -> bool:
        """Take over numbered changes `first` to `next_ - 1`; what was seen before changes nothing.

        False when some are missing before them, which one stream never does: the index is empty then, and a
        snapshot is needed.
        """
        if snapshot:
            self._held.clear()
        elif self._next is None or first > self._next:
            self._held.clear()
            self._next = None
            return False
        elif next_ <= self._next:
            return True
        for change in changes:
            held = self._held.setdefault(change.tier, set())
            held.difference_update(change.evicted)
            held.update(change.stored)
        self._next = next_
        return True

    def leading(self, keys: Sequence[int]) -> dict[str, int]:
        """How many of the leading blocks each tier brings, each block from the cheapest that holds it."""
        found: dict[str, int] = {}
        held = [(tier, self._held[tier]) for tier in TIERS if self._held.get(tier)]
        for key in keys:
            for tier, there in held:
                if key in there:
                    found[tier] = found.get(tier, 0) + 1
                    break
            else:
                break
        return found

    def __len__(self) -> int:
        """Blocks that at least one tier holds."""
        return len(set().union(*self._held.values()))
