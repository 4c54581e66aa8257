"""The tiered KV connector: the host tier, the tiers below it in order, and the traffic between them.

    engine's thread          caller's loop              the stack's loop ("kv-tiers")     tiers
    ---------------          -------------              -----------------------------     -----
    committed: copy,                                    write-behind, one queue a tier -> store
      policy, offer
                             lookup                 ->  host, then each tier for what  -> lookup
                                                        those above it lack
                             load                   ->  missing blocks: one fetch for  -> load into
                               arrived(count)       <-  all who want them                 host slots
                                                        host slots -> the pool, on the copy thread

What comes from below lands in host slots and stays there: the next one finds it in host RAM. Nothing but
the copy thread writes into a caller's blocks, and once `load` has returned or raised, not even that. So a
cancelled load leaves its blocks quiet at once, while the fetch behind it goes on for whoever joins it.

Two rules keep a slow tier from being worse than none: a load ends when a batch takes longer than computing
its blocks, or the load as a whole costs a few percent more than computing what it brought; and a tier whose
measured bandwidth is below the speed of computing is not asked.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from math import inf
from typing import Any, TypeVar

from core.clock import Clock, monotonic
from core.errors import ConfigError
from core.log import get
from kvtransfer.commits import Commits
from kvtransfer.fetches import Fetches
from kvtransfer.host_tier import HostTier
from kvtransfer.rates import Rate, RateMeter
from kvtransfer.store_policy import StorePolicy
from kvtransfer.stores import Stores
from kvtransfer.target import Target
from kvtransfer.threads import DaemonThreads
from kvtransfer.tier import OnChange, Tier, TierStats, unheard
from kvtransfer.tier_pool import TierPool

TIERS = ("host", "disk", "redis")
_HOST_GUESS = Rate(latency_s=0.0005, nbytes_per_s=5e9)
_STAGING_BLOCKS = 128
"""Slots when there is no host tier: what is under way up or down still needs a place."""
_BATCH_NBYTES = 12 * 2**20
"""One fetch and one copy: long enough to keep a tier's threads busy, short enough (1-2 ms of memcpy)
that a step can begin between two."""
_FIRST_BATCH = 4
"""Blocks of a load's first batch: what is lost at most when the tier turns out slow."""
_DEPTH = 2
"""Batches of one load under way at once, so that a tier is not idle while one is copied."""
_JITTER_S = 0.08
"""No batch is called slow before that."""
_MAX_LOSS = 0.04
"""Of the time to compute all of a load's blocks: it ends before it has cost that much more than it saved."""

log = get("kvtransfer")
T = TypeVar("T")


def parse_order(setting: str) -> tuple[str, ...]:
    """`host,disk,redis` -> names, best first. Raises ConfigError: unknown, doubled, host not first."""
    names = tuple(filter(None, (name.strip() for name in setting.split(","))))
    for name in names:
        if name not in TIERS:
            raise ConfigError(f"tier {name!r} is not known; known tiers: {', '.join(TIERS)}")
        if names.count(name) > 1:
            raise ConfigError(f"tier {name!r} stands twice in the order {setting!r}; name each tier once")
    if "host" in names[1:]:
        raise ConfigError(f"the host tier is the way to all others: name it first, not as in {setting!r}")
    return names


@dataclass(frozen=True, slots=True)
class Held:
    """`source` holds blocks `first` to `first + count - 1` of what was looked up."""

    source: str
    first: int
    count: int


class TierStack:
    """All tiers of one worker, above them its `pool`. Starts a thread with an event loop and one that copies.

    `host_nbytes` 0: no host tier, only a staging arena. A block leaves it long before it is used again, so
    every block is stored below when it is committed, whatever `policy` says. `write_behind_nbytes` bounds
    each lower tier's queue, and so does a quarter of the arena, half of a staging arena.
    `lookup_timeout_s` and `load_timeout_s` bound one lookup of a tier and one batch of a load, whatever
    its own deadlines are. `on_host_change` hears of the host tier's blocks; the other tiers were told by
    whoever made them. Raises ConfigError as HostTier does.
    """

    def __init__(
        self,
        pool: TierPool,
        host_nbytes: int,
        tiers: Sequence[Tier] = (),
        policy: StorePolicy = StorePolicy.SECOND_HIT,
        *,
        write_behind_nbytes: int = 256 * 2**20,
        lookup_timeout_s: float = 0.5,
        load_timeout_s: float = 2.0,
        on_host_change: OnChange = unheard,
        clock: Clock = monotonic,
    ) -> None:
        self._serve_host = host_nbytes > 0
        self._pool, block_nbytes = pool, pool.block_nbytes
        arena_nbytes = host_nbytes or _STAGING_BLOCKS * block_nbytes
        self.host = HostTier(arena_nbytes, block_nbytes, on_host_change if self._serve_host else unheard)
        pool.pin(self.host.memory)
        self._lookup_timeout_s, self._load_timeout_s = lookup_timeout_s, load_timeout_s
        self._clock = clock
        # A quarter of the slots at most for what goes down, and one for what comes up.
        share = max(1, self.host.num_slots // (4 * max(1, len(tiers))))
        down = share if self._serve_host else 2 * share  # a whole step's blocks come at once
        queue_blocks = min(down, max(1, write_behind_nbytes // block_nbytes))
        policy = policy if self._serve_host else StorePolicy.WRITE_THROUGH
        self._batch = max(1, min(_BATCH_NBYTES // block_nbytes, share // _DEPTH))
        self._loop = asyncio.new_event_loop()
        self._fetches = {
            tier.name: Fetches(tier, self.host, share, self._batch, load_timeout_s, clock) for tier in tiers
        }
        self._stores = Stores(self.host, tiers, policy, self._loop, queue_blocks)
        self._opening = [self._loop.create_task(fetches.open()) for fetches in self._fetches.values()]
        self._storing = self._loop.create_task(self._stores.run())
        self._host_meter = RateMeter(_HOST_GUESS, clock)
        self._copier = DaemonThreads(1, "kv-copy")
        self._commits = Commits(pool, self.host, self._stores, self._copier, clock)
        self._closed = False
        self._thread = threading.Thread(target=self._loop.run_forever, name="kv-tiers", daemon=True)
        self._thread.start()

    # The engine's thread; nothing here waits for a disk or a network.

    def committed(self, hashes: Sequence[bytes], block_ids: Sequence[int]) -> None:
        """Copy blocks of the pool into the host tier, and let the policy decide about the tiers below.

        Costs a memcpy for each that is not held already; of a pool on a GPU it begins a copy that the copy
        thread waits for: until it has landed, a block is not found.
        """
        if not self._closed:
            self._commits.committed(hashes, block_ids)

    def touch(self, hashes: Sequence[bytes]) -> None:
        """The leading blocks of a chain were hit in the device's pool: a use, as a load is one.

        When a sequence ends call `host.touch` instead, so that its tail goes before its head.
        """
        self.host.touch(hashes)
        self._stores.used([block_hash for block_hash in hashes if self.host.holds(block_hash)])

    # The caller's loop.

    async def lookup(self, hashes: Sequence[bytes], block_budget_s: float = inf) -> list[Held]:
        """Who holds the leading blocks: segments without gaps, each from the first tier that has it.

        A tier that needs more than `block_budget_s` for a block's bytes (the time to compute one here) is
        passed over. A fault is a miss.
        """
        held = []
        count = self.host.lookup(hashes) if self._serve_host else 0
        if count:
            held.append(Held(self.host.name, 0, count))
        if count < len(hashes) and self._fetches and not self._closed:
            held += await self._call(self._lookup_below(hashes, count, block_budget_s))
        return held

    async def load(
        self,
        source: str,
        hashes: Sequence[bytes],
        block_ids: Sequence[int],
        arrived: Callable[[int], None],
        block_budget_s: float = inf,
        is_use: bool = True,
    ) -> int:
        """Bring one segment's blocks into the pool's `block_ids`; returns how many leading ones are there.

        `arrived(count)` is called on the caller's loop as they come. Fewer than asked is a miss: of the
        tier, or of time, when computing seems faster at `block_budget_s` a block. `is_use`: whether the store
        policy counts it, as it should but for a preempted sequence that comes back. Once this returned or
        raised, CancelledError included, nothing writes into them any more.
        """
        if len(hashes) != len(block_ids):
            raise ValueError(f"{len(hashes)} blocks cannot fill {len(block_ids)} of the pool")
        fetches = None if source == self.host.name else self._fetches[source]
        if self._closed:
            return 0
        target = Target(self.host, hashes, self._pool, block_ids, arrived)
        try:
            return await self._call(self._load(fetches, hashes, target, block_budget_s, is_use))
        finally:
            target.revoke()

    def rate(self, source: str) -> Rate:
        """What loading from this tier costs now, measured or a first guess; never blocks."""
        return self._host_meter.rate() if source == self.host.name else self._fetches[source].rate()

    def stats(self) -> dict[str, TierStats]:
        """By tier, in order; what the stack gave up on a tier's behalf stands in that tier's counters."""
        stats = {self.host.name: self.host.stats()} if self._serve_host else {}
        for writer in self._stores.writers:
            own, fetches = writer.tier.stats(), self._fetches[writer.tier.name]
            errors = own.errors + writer.errors + fetches.errors
            stats[writer.tier.name] = replace(own, dropped=own.dropped + writer.dropped, errors=errors)
        return stats

    async def close(self, drain_s: float = 2.0) -> None:
        """Store what is queued and end what is being fetched, for at most `drain_s`; idempotent."""
        if self._closed:
            return
        self._closed = True
        try:
            await self._call(self._close(drain_s))
        finally:
            self._loop.call_soon_threadsafe(self._loop.stop)
            await asyncio.to_thread(self._thread.join, 5.0)
            self._copier.close()
            if not self._thread.is_alive():
                self._loop.close()

    async def _call(self, coroutine: Coroutine[Any, Any, T]) -> T:
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(coroutine, self._loop))

    # The stack's loop.

    async def _lookup_below(self, hashes: Sequence[bytes], first: int, block_budget_s: float) -> list[Held]:
        held = []
        for name, fetches in self._fetches.items():
            if self.host.block_nbytes / fetches.rate().nbytes_per_s > block_budget_s:
                continue
            count = await fetches.lookup(hashes[first:], self._lookup_timeout_s)
            if count:
                held.append(Held(name, first, count))
                first += count
            if first == len(hashes):
                break
        return held

    async def _load(
        self,
        fetches: Fetches | None,
        hashes: Sequence[bytes],
        target: Target,
        block_budget_s: float,
        is_use: bool,
    ) -> int:
        began = self._clock()
        kept = hashes[: self.host.pin(hashes)]
        try:
            with fetches.pinned(hashes) if fetches else nullcontext():
                done = await self._copy_batches(fetches, hashes, target, block_budget_s)
        finally:
            self.host.unpin(kept)
        if fetches is None:
            self._host_meter.add(done * self.host.block_nbytes, self._clock() - began)
        self.host.touch(hashes[:done])
        if is_use:
            self._stores.used(hashes[:done], came_from=fetches.tier if fetches else None)
        return done

    async def _copy_batches(
        self, fetches: Fetches | None, hashes: Sequence[bytes], target: Target, block_budget_s: float
    ) -> int:
        spans = _spans(len(hashes), self._batch)
        began = self._clock()
        coming: list[set[asyncio.Task[None]]] = []
        done = 0
        for i, (first, last) in enumerate(spans):
            # What is not known yet is tried with one small batch, which a second one would only delay.
            depth = _DEPTH if fetches and fetches.rate().measured else 1
            while fetches and len(coming) < min(len(spans), i + depth):
                coming.append(fetches.bring(hashes[slice(*spans[len(coming)])]))
            if fetches and coming[i]:
                in_hand_s = (done + _MAX_LOSS * len(hashes)) * block_budget_s - (self._clock() - began)
                limit_s = max(_JITTER_S, min(in_hand_s, (last - first) * block_budget_s))
                await asyncio.wait(coming[i], timeout=min(limit_s, self._load_timeout_s))
            count = await asyncio.wrap_future(self._copier.submit(target.fill, first, last))
            done += count
            if count:
                target.report(done)
            if count < last - first:
                break
        return done

    async def _close(self, drain_s: float) -> None:
        coming = (fetches.ended(drain_s) for fetches in self._fetches.values())
        undrained, *_ = await asyncio.gather(self._stores.drained(drain_s), *coming)
        if undrained:
            log.warning("tier.undrained", tiers=undrained, waited_s=drain_s)
        if others := asyncio.all_tasks() - {asyncio.current_task()}:
            for task in others:
                task.cancel()
            await asyncio.wait(others, timeout=1.0)
        for fetches in self._fetches.values():
            await fetches.close()


def _spans(count: int, batch: int) -> list[tuple[int, int]]:
    """Cut `count` blocks into batches [first, last): a small one first, then twice as many up to `batch`."""
    spans, first, size = [], 0, min(_FIRST_BATCH, batch)
    while first < count:
        spans.append((first, min(count, first + size)))
        first, size = spans[-1][1], min(batch, 2 * size)
    return spans
