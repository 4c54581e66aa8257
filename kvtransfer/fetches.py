"""What comes up out of one lower tier: each missing block is fetched once, for all who want it.

    bring(hashes)   held by the host tier        nothing to do
                    being fetched by another     wait for that fetch
                    missing                      slots of the host tier, tier.load, publish

A fetch belongs to nobody: when those who wanted it give up, it ends by itself and what it brought stays.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

from core.clock import Clock
from core.log import get
from kvtransfer.host_tier import HostTier
from kvtransfer.rates import Rate, RateMeter
from kvtransfer.tier import Tier

_GUESS = Rate(latency_s=0.001, nbytes_per_s=1e9)
"""Before the first load: what an NVMe disk or a Redis nearby can do. A wrong guess costs one small batch."""

_BUSY_S = 1.0
"""A tier that is never idle is measured this often."""

log = get("kvtransfer")


class Fetches:
    """At most `max_blocks` slots of the host tier are being filled from this tier at once, `batch` by one
    fetch; others wait for slots, at most `timeout_s`. All methods but `rate` belong to the stack's loop.
    """

    def __init__(
        self, tier: Tier, host: HostTier, max_blocks: int, batch: int, timeout_s: float, clock: Clock
    ) -> None:
        self.tier = tier
        self.errors = 0
        self._host, self._timeout_s, self._clock = host, timeout_s, clock
        self._turn = asyncio.Semaphore(max(1, max_blocks // batch))
        self._coming: dict[bytes, asyncio.Task[None]] = {}
        self._meter = RateMeter(_GUESS, clock)
        self._busy_since = 0.0
        self._busy_blocks = 0  # brought since then

    def rate(self) -> Rate:
        return self._meter.rate(len(self._coming) * self._host.block_nbytes)

    async def open(self) -> None:
        """Let the tier take up what it holds from earlier, before anyone asks."""
        await self._safe("open", self.tier.opened())

    async def lookup(self, hashes: Sequence[bytes], timeout_s: float) -> int:
        """How many leading blocks the tier holds; 0 when it fails or takes longer than `timeout_s`."""
        try:
            async with asyncio.timeout(timeout_s):
                return await self._safe("lookup", self.tier.lookup(hashes))
        except TimeoutError:
            self.errors += 1
            return 0

    def bring(self, hashes: Sequence[bytes]) -> set[asyncio.Task[None]]:
        """Start what is missing; the fetches to wait for until all of these have come or failed."""
        missing = [h for h in hashes if h not in self._coming and not self._host.holds(h)]
        if missing:
            if not self._coming:
                self._busy_since, self._busy_blocks = self._clock(), 0
            task = asyncio.get_running_loop().create_task(self._fetch(missing))
            self._coming.update(dict.fromkeys(missing, task))
        return {self._coming[h] for h in hashes if h in self._coming}

    @contextmanager
    def pinned(self, hashes: Sequence[bytes]) -> Iterator[None]:
        """Keep blocks in the tier that a load is about to ask for."""
        self.tier.pin(hashes)
        try:
            yield
        finally:
            self.tier.unpin(hashes)

    async def ended(self, timeout_s: float) -> None:
        """Wait until nothing is being fetched, at most so long."""
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                while self._coming:
                    await asyncio.wait(set(self._coming.values()))

    async def close(self) -> None:
        try:
            await self.tier.close()
        except Exception as error:
            log.error("tier.broke", tier=self.tier.name, operation="close", exc_info=error)

    async def _fetch(self, hashes: list[bytes]) -> None:
        try:
            async with asyncio.timeout(self._timeout_s):
                await self._turn.acquire()
        except TimeoutError:
            self.errors += 1
            self._done(hashes, 0)
            return
        slots: list[int] = []
        count = 0
        try:
            if slots := self._host.take(len(hashes)):
                buffers = [self._host.slot(slot) for slot in slots]
                count = await self._safe("load", self.tier.load(hashes, buffers))
        finally:
            self._host.publish(hashes[:count], slots[:count])
            self._host.give_back(slots[count:])
            self._turn.release()
            self._done(hashes, count)

    def _done(self, hashes: Sequence[bytes], count: int) -> None:
        """Forget a fetch, and learn from the time in which the tier was busy, for whomever: two loads at
        once each take twice as long, but the tier is as fast as before."""
        for block_hash in hashes:
            del self._coming[block_hash]
        self._busy_blocks += count
        busy_s = self._clock() - self._busy_since
        if not self._coming or busy_s > _BUSY_S:
            self._meter.add(self._busy_blocks * self._host.block_nbytes, busy_s)
            self._busy_since, self._busy_blocks = self._clock(), 0

    async def _safe(self, operation: str, coroutine: Coroutine[Any, Any, int]) -> int:
        try:
            return await coroutine
        except Exception as error:  # a tier must not raise; one that does has failed, no more
            log.error("tier.broke", tier=self.tier.name, operation=operation, exc_info=error)
            self.errors += 1
            return 0
