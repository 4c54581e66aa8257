"""All threads of a tier stack at once, and how it ends."""

import asyncio
import random
import threading
from contextlib import suppress

import pytest
from stack_blocks import NBYTES, POOL, commit, key, keys, load, payload, stack_of, tier_with, until

from kvtransfer.store_policy import StorePolicy
from kvtransfer.tier import FakeTier
from kvtransfer.tier_pool import RegionPool
from kvtransfer.tier_stack import Held, TierStack


async def test_random_traffic_never_gives_foreign_bytes_and_leaves_no_pin():
    """Commits, loads, cancels and faults over an arena much smaller than what is asked for; `load` compares
    every byte. 1. One load of each kind: whole, cut short, cancelled. 2. Traffic at random."""
    rng = random.Random(5)
    disk, redis = tier_with(*range(64)), tier_with(*range(32, 96), name="redis")
    async with stack_of(disk, redis, slots=40, load_timeout_s=0.05) as stack:
        stopped = threading.Event()

        def engine() -> None:
            own = random.Random(6)
            while not stopped.is_set():
                block = own.randrange(200)
                commit(stack, block)
                stack.touch(keys(block, block + 1))

        thread = threading.Thread(target=engine)

        async def client(first: int, count: int, source: str, patience_s: float) -> None:
            with suppress(TimeoutError):
                async with asyncio.timeout(patience_s):
                    await load(stack, source, range(first, first + count))

        assert await load(stack, "disk", range(4)) == [0, 1, 2, 3]
        assert await load(stack, "redis", range(94, 98)) == [94, 95]
        disk.stick()
        cut = asyncio.create_task(load(stack, "disk", range(60, 64), block_budget_s=1.0))
        await until(lambda: disk.loads)
        cut.cancel()
        await asyncio.wait([cut])
        assert cut.cancelled()
        disk.release()
        thread.start()
        for _ in range(40):
            disk.broken, redis.full = rng.random() < 0.2, rng.random() < 0.5
            await asyncio.gather(
                *(
                    client(
                        rng.randrange(90),
                        rng.randrange(1, 24),
                        rng.choice(["host", "disk", "redis"]),
                        rng.choice([0.0005, 0.002, 5.0]),
                    )
                    for _ in range(6)
                )
            )
        stopped.set()
        await asyncio.to_thread(thread.join, 10)
        await until(lambda: len(stack.host.take(stack.host.num_slots)) == stack.host.num_slots)


async def test_close_stores_what_is_queued_and_ends_the_threads():
    disk = FakeTier("disk")
    stack = TierStack(RegionPool(POOL), 32 * NBYTES, [disk], StorePolicy.WRITE_THROUGH)
    for i in range(8):
        commit(stack, i)
    assert await load(stack, "host", range(1)) == [0]
    ours = {"kv-tiers", "kv-copy-0"}
    assert ours <= {thread.name for thread in threading.enumerate()}
    await stack.close()
    await stack.close()
    assert len(disk.held) == 8
    assert disk.closed
    assert not commit(stack, 9)
    stack.touch(keys(0))
    assert await stack.lookup(keys(0)) == [Held("host", 0, 1)]
    assert await load(stack, "disk", range(1)) == []
    await until(lambda: ours.isdisjoint(thread.name for thread in threading.enumerate()))


async def test_close_does_not_wait_for_a_stuck_tier():
    disk = tier_with(7)
    stack = TierStack(RegionPool(POOL), 32 * NBYTES, [disk], StorePolicy.WRITE_THROUGH)
    disk.stick()
    commit(stack, 0)
    loading = asyncio.create_task(load(stack, "disk", range(7, 8)))
    await until(lambda: disk.loads)
    await stack.close(drain_s=0.01)
    with pytest.raises(asyncio.CancelledError):
        await loading


async def test_close_lets_loads_end_first():
    class Watched(FakeTier):
        at_work = 0

        async def load(self, hashes, into):
            self.at_work += 1
            count = await super().load(hashes, into)  # cancelled, it would count for ever
            self.at_work -= 1
            return count

        async def close(self):
            assert not self.at_work
            await super().close()

    disk = Watched("disk", held={key(7): bytes(payload(7))})
    stack = TierStack(RegionPool(POOL), 32 * NBYTES, [disk], StorePolicy.WRITE_THROUGH)
    disk.stick()
    loading = asyncio.create_task(load(stack, "disk", range(7, 8)))
    await until(lambda: disk.at_work)
    closing = asyncio.create_task(stack.close(drain_s=20.0))
    assert not (await asyncio.wait([closing], timeout=0.1))[0]
    disk.release()
    await closing
    await asyncio.wait([loading])
    assert disk.closed
    assert stack.host.holds(key(7))
