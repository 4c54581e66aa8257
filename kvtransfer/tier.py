"""A place below the host's memory where blocks outlive it: who calls what, and when.

    tier stack (one event loop of its own)      tier
    ------------------------------------        ----
    opened()             once            --->   takes up what an earlier process left
    lookup(hashes)       before a load   --->   index or one round trip, bounded by its own deadline
    load(hashes, into)                   --->   fills the buffers, verifies header and checksum
    store(blocks)        write-behind    --->   publishes after the whole object is written
    pin / unpin                          --->   what must not be evicted
    close()              at exit         --->   once nothing of the above runs

A tier never raises for its own faults (disk full, server gone, damaged object): it reports less and
counts. All coroutines of one tier run on the same loop; several may run at once. What blocks, it does
on threads of its own. The stack may cancel a lookup that is too slow, but a load or a store only at exit,
when it has not returned in time: their buffers belong to the tier until they return or were cancelled.

Whoever made a tier may be told of its blocks (`OnChange`), so that routers know who holds what.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

OnChange = Callable[[Sequence[bytes], Sequence[bytes]], None]
"""(stored, evicted): hashes of blocks that this tier holds since now, and no longer.

Called in the order in which the tier changed, on whatever thread changed it, perhaps with the tier's lock
held: it must not wait and must not call the tier. Blocks of other namespaces are never told of."""


def unheard(stored: Sequence[bytes], evicted: Sequence[bytes]) -> None:
    """An `OnChange` for when nobody asks."""


@dataclass(frozen=True, slots=True)
class TierStats:
    """Counters only grow; the last four are gauges. Seconds are busy time, without queueing."""

    queries: int = 0
    """Blocks asked for in lookups."""
    hits: int = 0
    """Of these, blocks that were held."""
    load_nbytes: int = 0
    load_s: float = 0.0
    store_nbytes: int = 0
    store_s: float = 0.0
    evictions: int = 0
    corrupt: int = 0
    """Objects that failed verification; each was deleted."""
    dropped: int = 0
    """Stores given up: no room, no queue, no tier."""
    errors: int = 0
    """Operations that failed or ran into their deadline."""
    used_nbytes: int = 0
    capacity_nbytes: int = 0
    """0 = no cap of its own."""
    num_blocks: int = 0
    breaker: str = ""
    """`closed`, `open` or `half-open`; empty for a tier that has none."""


class Tier(Protocol):
    """One lower tier (disk, Redis). Payloads are whole blocks of one size."""

    name: str

    async def opened(self) -> bool:
        """Wait until it can be used, or cannot; whether it can. Nobody has to call this first."""
        ...

    async def lookup(self, hashes: Sequence[bytes]) -> int:
        """How many of the leading blocks are held now; 0 after a fault. Bounded by its own deadline."""
        ...

    async def load(self, hashes: Sequence[bytes], into: Sequence[memoryview]) -> int:
        """Fill the buffers in order; returns how many leading ones hold verified payloads now.

        The others are undefined. Once it returned nothing writes into any of them.
        """
        ...

    async def store(self, blocks: Sequence[tuple[bytes, memoryview]]) -> int:
        """Keep (hash, payload) pairs; payloads do not change until it returns.

        Returns how many are held now. One that is held already counts and is not written again.
        """
        ...

    def pin(self, hashes: Sequence[bytes]) -> None:
        """Do not evict these until `unpin`; counted. Nothing where the tier does not evict itself."""
        ...

    def unpin(self, hashes: Sequence[bytes]) -> None: ...

    def stats(self) -> TierStats:
        """Does not block; callable from any thread."""
        ...

    async def close(self) -> None:
        """Idempotent and bounded."""
        ...


@dataclass
class FakeTier:
    """In memory, for tests. `full` refuses stores, `broken` faults everything, and between `stick` and
    `release` every operation waits."""

    name: str = "fake"
    held: dict[bytes, bytes] = field(default_factory=dict)
    full: bool = False
    broken: bool = False
    loads: list[list[bytes]] = field(default_factory=list)
    closed: bool = False

    def __post_init__(self) -> None:
        self._moving = asyncio.Event()
        self._moving.set()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._queries = self._hits = self._dropped = self._errors = 0

    def stick(self) -> None:
        self._moving.clear()

    def release(self) -> None:
        """From any thread."""
        if self._loop:
            self._loop.call_soon_threadsafe(self._moving.set)
        else:
            self._moving.set()

    async def opened(self) -> bool:
        return True

    async def lookup(self, hashes: Sequence[bytes]) -> int:
        await self._pass()
        self._queries += len(hashes)
        found = self._leading(hashes)
        self._hits += found
        return found

    async def load(self, hashes: Sequence[bytes], into: Sequence[memoryview]) -> int:
        self.loads.append(list(hashes))
        await self._pass()
        found = self._leading(hashes)
        for block_hash, buffer in zip(hashes[:found], into[:found], strict=True):
            buffer[:] = self.held[block_hash]
        return found

    async def store(self, blocks: Sequence[tuple[bytes, memoryview]]) -> int:
        await self._pass()
        if self.full or self.broken:
            self._dropped += len(blocks)
            self._errors += self.broken
            return 0
        self.held.update((block_hash, bytes(payload)) for block_hash, payload in blocks)
        return len(blocks)

    def pin(self, hashes: Sequence[bytes]) -> None: ...

    def unpin(self, hashes: Sequence[bytes]) -> None: ...

    def stats(self) -> TierStats:
        return TierStats(
            queries=self._queries,
            hits=self._hits,
            dropped=self._dropped,
            errors=self._errors,
            num_blocks=len(self.held),
        )

    async def close(self) -> None:
        self.closed = True

    async def _pass(self) -> None:
        self._loop = asyncio.get_running_loop()
        await self._moving.wait()

    def _leading(self, hashes: Sequence[bytes]) -> int:
        if self.broken:
            self._errors += 1
            return 0
        return next((i for i, block_hash in enumerate(hashes) if block_hash not in self.held), len(hashes))
