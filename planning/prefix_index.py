"""Which worker can bring which block without computing it, as a router knows it from the workers' events.

    block key -> the workers that hold it          one index for the fleet
    worker    -> block key -> its tiers            one set of bits a block

A request costs what its blocks and the few workers it looks at cost, whatever the fleet's size.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice

TIERS = ("device", "host", "disk", "redis")
"""Cheapest first."""

WINDOW = 256
"""Of a block's many holders, those that are ever looked at for that: a walk of a few microseconds."""

_BIT = {tier: 1 << number for number, tier in enumerate(TIERS)}
_CHEAPEST = [TIERS[(bits & -bits).bit_length() - 1] if bits else "" for bits in range(1 << len(TIERS))]


@dataclass(frozen=True, slots=True)
class Changes:
    """Blocks by the first 8 bytes of their hash (`core.blocks.block_key`)."""

    tier: str
    stored: Sequence[int] = ()
    evicted: Sequence[int] = ()


@dataclass(slots=True)
class _Held:
    """Of one worker. `next`: number of its next change; None = a snapshot is needed."""

    tiers: dict[int, int] = field(default_factory=dict)
    next: int | None = None


class PrefixIndex:
    """Blocks of all workers. A block that leaves one tier stays known as long as another holds it."""

    def __init__(self) -> None:
        self._workers: dict[str, _Held] = {}
        self._holders: dict[int, str | dict[str, None]] = {}  # most blocks have one

    def apply(self, worker: str, first: int, next_: int, snapshot: bool, changes: Iterable[Changes]) -> bool:
        """Take over a worker's numbered changes `first` to `next_ - 1`; what was seen before changes nothing.

        A snapshot replaces all that was known of this worker, unless it is older than that. False when some
        are missing before these, which one stream never does: nothing is known of it then, and a snapshot is
        needed. Tiers that are not in TIERS are left out.
        """
        held = self._workers.get(worker)
        if held is not None and held.next is not None and next_ < held.next:
            return True
        if snapshot:
            self.forget(worker)
            held = self._workers[worker] = _Held()
        elif held is None or held.next is None or first > held.next:
            self.forget(worker)
            return False
        elif next_ <= held.next:
            return True
        for change in changes:
            if bit := _BIT.get(change.tier):
                self._evict(worker, held.tiers, bit, change.evicted)
                self._store(worker, held.tiers, bit, change.stored)
        held.next = next_
        return True

    def forget(self, worker: str) -> None:
        """Nothing is known of it any more. Idempotent."""
        if held := self._workers.pop(worker, None):
            for key in held.tiers:
                self._drop(worker, key)

    def leading(self, worker: str, keys: Sequence[int]) -> dict[str, int]:
        """How many of the leading blocks each tier brings, each block from the cheapest that holds it."""
        held = self._workers.get(worker)
        if held is None or not keys or keys[0] not in held.tiers:
            return {}
        bits = list(map(held.tiers.get, keys))
        if None in bits:
            del bits[bits.index(None) :]
        if len(set(bits)) == 1:
            return {_CHEAPEST[bits[0]]: len(bits)}  # type: ignore[index]
        return dict(Counter(map(_CHEAPEST.__getitem__, bits)))  # type: ignore[arg-type]

    def holders(self, keys: Sequence[int], at_most: int, rng: random.Random) -> Iterator[str]:
        """Workers that may hold a leading part of these blocks, those with the longest first, none twice;
        of those that share a block `at_most`, others each time."""
        found = list(map(self._holders.get, keys))
        if None in found:
            del found[found.index(None) :]
        seen: set[str] = set()
        last: str | int | None = None
        for there in reversed(found):
            same = there if isinstance(there, str) else len(there)  # type: ignore[arg-type]
            if same == last:  # who holds a block holds those before it
                continue
            last = same
            for worker in (there,) if isinstance(there, str) else _some(there, at_most, rng):  # type: ignore
                if worker not in seen:
                    seen.add(worker)
                    yield worker

    def num_blocks(self, worker: str) -> int:
        """Blocks of it that at least one tier holds."""
        held = self._workers.get(worker)
        return len(held.tiers) if held else 0

    def _store(self, worker: str, tiers: dict[int, int], bit: int, keys: Iterable[int]) -> None:
        holders = self._holders
        for key in keys:
            bits = tiers.get(key, 0)
            tiers[key] = bits | bit
            if bits:
                continue
            there = holders.get(key)
            if there is None:
                holders[key] = worker
            elif isinstance(there, str):
                holders[key] = {there: None, worker: None}
            else:
                there[worker] = None

    def _evict(self, worker: str, tiers: dict[int, int], bit: int, keys: Iterable[int]) -> None:
        for key in keys:
            bits = tiers.get(key, 0)
            if bits & ~bit:
                tiers[key] = bits & ~bit
            elif bits:
                del tiers[key]
                self._drop(worker, key)

    def _drop(self, worker: str, key: int) -> None:
        there = self._holders[key]
        if isinstance(there, str):
            del self._holders[key]
            return
        del there[worker]
        if len(there) == 1:
            [self._holders[key]] = there


def _some(there: dict[str, None], at_most: int, rng: random.Random) -> Iterator[str]:
    """`at_most` in a row of the first WINDOW."""
    start = rng.randrange(max(1, min(len(there), WINDOW) - at_most + 1))
    return islice(there, start, start + at_most)
