"""What goes down: the store policy applied, and the queues of the tiers that it goes to.

Under `on-evict` nothing is copied at the moment of eviction, which may be in the middle of a step. The
coldest blocks are stored ahead of it and then evicted, so that a reserve of free slots is always at hand.
When blocks come faster than the tiers take them, the reserve runs out and the host tier evicts by itself:
those blocks are lost below, and counted as dropped.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence
from contextlib import suppress

from kvtransfer.host_tier import HostTier
from kvtransfer.store_policy import Admission, StorePolicy
from kvtransfer.tier import Tier
from kvtransfer.write_behind import WriteBehind


class Stores:
    """All methods but `run` and `drained` may be called from any thread, and none of them waits."""

    def __init__(
        self,
        host: HostTier,
        tiers: Sequence[Tier],
        policy: StorePolicy,
        loop: asyncio.AbstractEventLoop,
        max_blocks: int,
    ) -> None:
        self._host, self._loop = host, loop
        self._lock = threading.Lock()
        self._admission = Admission(policy)
        self.writers = [WriteBehind(tier, host, loop, max_blocks, self._done) for tier in tiers]
        self._reserve = max_blocks if tiers and policy is StorePolicy.ON_EVICT else 0
        self._flushing: dict[bytes, int] = {}  # block -> queues it is still in; the loop's
        self._flush_due = False
        host.on_evict = self._evicted

    def used(self, hashes: Sequence[bytes], came_from: Tier | None = None, computed: bool = False) -> None:
        """One use more of each block, and of the host tier's room; `came_from` holds them already."""
        with self._lock:
            due = self._admission.used(hashes, computed)
        wanted = [writer for writer in self.writers if writer.tier is not came_from]
        for block_hash in due:
            taken = [writer.offer(block_hash) for writer in wanted]
            if not all(taken):
                self._not_stored((block_hash,))
        if self._host.num_free < self._reserve and not self._flush_due:
            self._flush_due = True
            with suppress(RuntimeError):  # the loop is closed: the process is leaving
                self._loop.call_soon_threadsafe(self._flush)

    async def run(self) -> None:
        await asyncio.gather(*(writer.run() for writer in self.writers))

    async def drained(self, timeout_s: float) -> list[str]:
        """Wait for the queues; names of the tiers whose queue is not empty after `timeout_s`."""
        empty = await asyncio.gather(*(writer.drained(timeout_s) for writer in self.writers))
        return [writer.tier.name for writer, ok in zip(self.writers, empty, strict=True) if not ok]

    def _evicted(self, _: bytes) -> None:
        if self._reserve:
            for writer in self.writers:
                writer.lost()

    def _not_stored(self, hashes: Sequence[bytes]) -> None:
        with self._lock:
            for block_hash in hashes:
                self._admission.not_stored(block_hash)

    # The loop.

    def _flush(self) -> None:
        self._flush_due = False
        missing = self._reserve - self._host.num_free - len(self._flushing)
        room = min(writer.room for writer in self.writers)
        coldest = self._host.pin_coldest(max(0, min(missing, room)))
        for block_hash in coldest:
            if queues := sum([writer.offer(block_hash) for writer in self.writers]):
                self._flushing[block_hash] = queues
        self._host.unpin(coldest)

    def _done(self, hashes: Sequence[bytes], stored: int) -> None:
        """A queue is through with these. Evicted whether stored or not: there must be room."""
        if stored < len(hashes):
            self._not_stored(hashes)
        for block_hash in hashes:
            if block_hash in self._flushing:
                self._flushing[block_hash] -= 1
                if self._flushing[block_hash] <= 0:
                    del self._flushing[block_hash]
                    self._host.evict(block_hash)
