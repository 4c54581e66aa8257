"""What goes down, and when."""

import asyncio
import threading

import pytest
from stack_blocks import NBYTES, commit, key, keys, load, payload, stack_of, tier_with, until

from kvtransfer.store_policy import StorePolicy
from kvtransfer.tier import FakeTier
from kvtransfer.tier_stack import Held


async def test_what_a_tier_lost_is_stored_again_once_it_was_computed_again():
    disk = FakeTier("disk")
    async with stack_of(disk) as stack:
        for _ in range(2):
            assert commit(stack, 0)
            await until(lambda: key(0) in disk.held)
            del disk.held[key(0)]


async def test_a_stuck_tier_does_not_delay_a_commit():
    """The engine's thread commits everything while the tier's store never returns."""
    disk = FakeTier("disk")
    async with stack_of(disk, slots=32) as stack:
        disk.stick()
        committed = []

        def engine() -> None:
            committed.extend(commit(stack, i) for i in range(100))

        thread = threading.Thread(target=engine)
        thread.start()
        await asyncio.to_thread(thread.join, 10)
        assert committed == [True] * 100
        assert disk.held == {}
        assert stack.stats()["disk"].dropped == 100 - 32 // 4  # a quarter of the slots may wait
        disk.release()
        await until(lambda: len(disk.held) == 8)


async def test_write_behind_is_bounded_in_bytes():
    disk = FakeTier("disk")
    async with stack_of(disk, slots=64, write_behind_nbytes=3 * NBYTES) as stack:
        disk.stick()
        for i in range(10):
            commit(stack, i)
        assert stack.stats()["disk"].dropped == 7


async def test_one_stuck_tier_does_not_starve_the_other():
    disk, redis = FakeTier("disk"), FakeTier("redis")
    async with stack_of(disk, redis) as stack:
        disk.stick()
        for i in range(3):
            commit(stack, i)
        await until(lambda: len(redis.held) == 3)
        assert disk.held == {}


@pytest.mark.parametrize("trouble", ["full", "broken"])
async def test_a_tier_without_space_loses_nothing_but_the_store(trouble):
    disk = FakeTier("disk")
    async with stack_of(disk) as stack:
        setattr(disk, trouble, True)
        assert commit(stack, 0)
        await until(lambda: stack.stats()["disk"].dropped == 1)
        assert await load(stack, "host", range(1)) == [0]
        setattr(disk, trouble, False)
        stack.touch(keys(0))  # the next use offers it again
        await until(lambda: disk.held == {key(0): bytes(payload(0))})


async def test_second_hit_stores_what_was_used_twice():
    disk = FakeTier("disk")
    async with stack_of(disk, policy=StorePolicy.SECOND_HIT) as stack:
        for i in range(6):
            commit(stack, i)
        commit(stack, 0)
        await load(stack, "host", range(1, 3))
        await load(stack, "host", range(4, 6), is_use=False)
        stack.touch(keys(3, 77))  # 77 is in the device's pool only: nothing to store it from
        stack.touch(keys(3, 77))
        await until(lambda: len(disk.held) == 4)
        assert stack.stats()["disk"].dropped == 0
    assert sorted(disk.held) == keys(0, 1, 2, 3)


async def test_on_evict_stores_what_leaves_the_host_tier():
    disk = FakeTier("disk")
    async with stack_of(disk, slots=16, policy=StorePolicy.ON_EVICT) as stack:
        for i in range(100):
            commit(stack, i)
            await until(lambda: stack.host.num_free > 0)
        await until(lambda: stack.host.num_free >= 4)
        stats = stack.stats()
        assert stats["disk"].dropped == 0
        in_host = {h for h in keys(*range(100)) if stack.host.holds(h)}
        assert in_host
        assert in_host | set(disk.held) == set(keys(*range(100)))
        assert disk.held[key(7)] == bytes(payload(7))


async def test_on_evict_stores_in_every_tier_before_the_block_goes():
    disk, redis = FakeTier("disk"), FakeTier("redis")
    async with stack_of(disk, redis, slots=32, policy=StorePolicy.ON_EVICT) as stack:
        redis.stick()
        for i in range(30):
            commit(stack, i)
        await until(lambda: len(disk.held) >= 2)
        assert stack.host.holds(key(0))
        redis.release()
        await until(lambda: stack.host.num_free >= 4)
        assert set(redis.held) == set(disk.held)
        assert not stack.host.holds(key(0))


async def test_on_evict_drops_and_counts_when_the_tier_is_stuck():
    disk = FakeTier("disk")
    async with stack_of(disk, slots=16, policy=StorePolicy.ON_EVICT) as stack:
        disk.stick()
        for i in range(100):
            assert commit(stack, i)
        stats = stack.stats()
        assert stats["disk"].dropped == stats["host"].evictions > 0


async def test_a_block_from_redis_goes_to_disk_but_not_back():
    disk, redis = FakeTier("disk"), tier_with(0, 1, name="redis")
    async with stack_of(disk, redis) as stack:
        redis.full = True  # a store there would count
        await load(stack, "redis", range(2))
        await until(lambda: sorted(disk.held) == keys(0, 1))
        assert stack.stats()["redis"].dropped == 0


async def test_two_workers_share_through_one_tier():
    redis = FakeTier("redis")
    async with stack_of(redis) as first:
        for i in range(5):
            commit(first, i)
    async with stack_of(FakeTier("redis", held=redis.held)) as second:
        assert await second.lookup(keys(*range(6))) == [Held("redis", 0, 5)]
        assert await load(second, "redis", range(5)) == list(range(5))
