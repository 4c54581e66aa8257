"""One lower tier's queue of blocks to store: pinned in the host tier, never copied, never waited for.

    any thread                           the stack's loop
    ----------                           ----------------
    offer: room? pin, append   ----->    take a batch
    (full: False, one more dropped)      await tier.store(views of the slots)
                                         unpin, report

The limit is in pinned slots, so a tier that is slow, full or hung costs the host tier that much room, and
nobody any time.
"""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress

from core.log import get
from kvtransfer.host_tier import HostTier
from kvtransfer.tier import Tier

_BATCH_NBYTES = 8 * 2**20
"""Stored with one call: enough for a tier to pipeline, little enough to give slots back soon."""

log = get("kvtransfer")


class WriteBehind:
    """`on_done(hashes, stored)` is called on the loop for each batch; `stored` of them are held below."""

    def __init__(
        self,
        tier: Tier,
        host: HostTier,
        loop: asyncio.AbstractEventLoop,
        max_blocks: int,
        on_done: Callable[[Sequence[bytes], int], None],
    ) -> None:
        self.tier = tier
        self.max_blocks = max_blocks
        self.dropped = self.errors = 0
        self._host, self._loop, self._on_done = host, loop, on_done
        self._batch = max(1, _BATCH_NBYTES // host.block_nbytes)
        self._lock = threading.Lock()
        self._queue: deque[bytes] = deque()
        self._pinned: set[bytes] = set()  # queued or being stored
        self._wake, self._empty = asyncio.Event(), asyncio.Event()

    @property
    def room(self) -> int:
        """Blocks that `offer` would take now."""
        return self.max_blocks - len(self._pinned)

    def offer(self, block_hash: bytes) -> bool:
        """Store this block soon; False, and counted, when the queue is full or the host let it go."""
        with self._lock:
            if block_hash in self._pinned:
                return True
            if self.room <= 0 or not self._host.pin((block_hash,)):
                self.dropped += 1
                return False
            self._pinned.add(block_hash)
            self._queue.append(block_hash)
            wake = len(self._queue) == 1
        if wake:
            with suppress(RuntimeError):  # the loop is closed: the process is leaving
                self._loop.call_soon_threadsafe(self._wake.set)
        return True

    def lost(self) -> None:
        """Count a block that should have been stored and was evicted before it could be offered."""
        with self._lock:
            self.dropped += 1

    async def run(self) -> None:
        """Store what is offered, for ever; what goes wrong with one batch is counted and costs that batch."""
        while True:
            await self._wake.wait()
            self._wake.clear()
            while batch := self._take():
                try:
                    await self._store(batch)
                except Exception as error:
                    log.error("tier.broke", tier=self.tier.name, operation="write-behind", exc_info=error)
                    self.errors += 1
            if not self._pinned:
                self._empty.set()

    async def drained(self, timeout_s: float) -> bool:
        """Wait until nothing is queued or being stored; False when that takes longer."""
        if self._pinned:
            self._empty.clear()
            with suppress(TimeoutError):
                await asyncio.wait_for(self._empty.wait(), timeout_s)
        return not self._pinned

    def _take(self) -> list[bytes]:
        with self._lock:
            return [self._queue.popleft() for _ in range(min(self._batch, len(self._queue)))]

    async def _store(self, batch: list[bytes]) -> None:
        stored = 0
        try:
            stored = await self.tier.store([(h, self._host.view(h)) for h in batch])
        except Exception as error:  # a tier must not raise; one that does has failed, no more
            log.error("tier.broke", tier=self.tier.name, operation="store", exc_info=error)
            self.errors += 1
        finally:
            self._host.unpin(batch)
            with self._lock:
                self._pinned.difference_update(batch)
        self._on_done(batch, stored)
