import asyncio

import pytest
from host_slots import put
from stack_blocks import NBYTES, POOL, commit, key, keys, load, payload, stack_of, targets, tier_with, until

from core.errors import ConfigError
from kvtransfer.store_policy import StorePolicy
from kvtransfer.tier import FakeTier
from kvtransfer.tier_pool import RegionPool
from kvtransfer.tier_stack import Held, TierStack, parse_order

# Looking up.


async def test_each_tier_adds_what_those_above_lack():
    disk, redis = tier_with(2, 3, 4), tier_with(0, 1, 2, 5, 6, 9, name="redis")
    async with stack_of(disk, redis) as stack:
        commit(stack, 0)
        commit(stack, 1)
        held = await stack.lookup(keys(*range(10)))
        assert held == [Held("host", 0, 2), Held("disk", 2, 3), Held("redis", 5, 2)]
        assert await stack.lookup(keys(7, 8)) == []


async def test_a_tier_that_is_broken_or_silent_is_a_miss():
    disk, redis = tier_with(0), tier_with(0, 1, name="redis")
    async with stack_of(disk, redis, lookup_timeout_s=0.05) as stack:
        disk.broken = True
        assert await stack.lookup(keys(0, 1)) == [Held("redis", 0, 2)]
        redis.stick()
        assert await stack.lookup(keys(0, 1)) == []
        assert stack.stats()["disk"].errors == 2
        assert stack.stats()["redis"].errors == 1


async def test_a_tier_slower_than_computing_is_not_asked():
    disk, redis = tier_with(0, 1), tier_with(0, 1, name="redis")
    async with stack_of(disk, redis) as stack:
        for tier in ("disk", "redis"):
            seconds = NBYTES / stack.rate(tier).nbytes_per_s
            assert await stack.lookup(keys(0, 1), block_budget_s=seconds * 1.01) == [Held("disk", 0, 2)]
        assert await stack.lookup(keys(0, 1), block_budget_s=seconds * 0.99) == []


# Loading.


async def test_blocks_come_from_each_tier_and_stay_in_host():
    disk, redis = tier_with(*range(40)), tier_with(*range(40, 60), name="redis")
    async with stack_of(disk, redis, slots=256) as stack:
        assert await load(stack, "disk", range(40)) == list(range(40))
        assert await load(stack, "redis", range(40, 60)) == list(range(40, 60))
        assert await stack.lookup(keys(*range(60))) == [Held("host", 0, 60)]
        assert await load(stack, "host", range(60)) == list(range(60))
        assert sum(map(len, disk.loads)) == 40
        assert stack.rate("host").measured
        assert stack.rate("disk").measured


async def test_what_the_host_holds_is_not_loaded_again():
    disk = tier_with(*range(6))
    async with stack_of(disk) as stack:
        commit(stack, 1)
        assert await load(stack, "disk", range(6)) == list(range(6))
        assert sorted(h for hashes in disk.loads for h in hashes) == keys(0, 2, 3, 4, 5)


async def test_a_gap_ends_the_load_at_the_gap():
    disk = tier_with(*range(11), *range(12, 30))
    async with stack_of(disk, slots=256) as stack:
        assert await load(stack, "disk", range(30)) == list(range(11))
        assert await load(stack, "host", range(5, 30)) == list(range(5, 11))


async def test_concurrent_loads_of_one_prefix_are_one_load():
    disk = tier_with(*range(32))
    async with stack_of(disk, slots=256) as stack:
        disk.stick()
        loads = [asyncio.create_task(load(stack, "disk", range(count))) for count in (32, 32, 20)]
        await until(lambda: disk.loads)
        disk.release()
        assert await asyncio.gather(*loads) == [list(range(32)), list(range(32)), list(range(20))]
        asked = [h for hashes in disk.loads for h in hashes]
        assert sorted(asked) == keys(*range(32))


async def test_cancelling_one_load_leaves_the_others_and_writes_nothing_more():
    disk = tier_with(*range(4))
    async with stack_of(disk) as stack:
        disk.stick()
        into, arrived = targets(4), []
        gone = asyncio.create_task(stack.load("disk", keys(*range(4)), into, arrived.append))
        stays = asyncio.create_task(load(stack, "disk", range(4)))
        await until(lambda: disk.loads)
        gone.cancel()
        with pytest.raises(asyncio.CancelledError):
            await gone
        disk.release()
        assert await stays == [0, 1, 2, 3]
        assert not any(any(POOL.block(i)) for i in into)
        assert arrived == []
        assert len(disk.loads) == 1


async def test_a_batch_slower_than_computing_ends_the_load():
    disk = tier_with(*range(5))
    async with stack_of(disk) as stack:
        disk.stick()
        assert await load(stack, "disk", range(4), block_budget_s=0.001) == []
        disk.release()  # the fetch goes on and leaves its blocks in host RAM
        await until(lambda: stack.host.lookup(keys(*range(4))) == 4)
        await until(lambda: stack.rate("disk").measured)  # over 20 ms for four blocks
        assert await stack.lookup(keys(*range(5)), block_budget_s=0.001) == [Held("host", 0, 4)]
        assert await stack.lookup(keys(*range(5))) == [Held("host", 0, 4), Held("disk", 4, 1)]


async def test_a_load_ends_before_it_costs_much_more_than_it_saved():
    """Computing four blocks would take 20 s, waiting for them costs a few percent of that."""
    disk = tier_with(*range(4))
    async with stack_of(disk, load_timeout_s=60.0) as stack:
        disk.stick()
        async with asyncio.timeout(10.0):
            assert await load(stack, "disk", range(4), block_budget_s=5.0) == []
        disk.release()


async def test_blocks_of_a_silent_tier_are_a_miss():
    disk = tier_with(*range(4))
    async with stack_of(disk, load_timeout_s=0.03) as stack:
        disk.stick()
        assert await load(stack, "disk", range(4)) == []


async def test_a_tier_that_raises_or_lies_short_is_a_miss():
    class Raising(FakeTier):
        async def load(self, hashes, into):
            into[0][:] = bytes(NBYTES)
            raise OSError("input/output error")

    disk = Raising("disk", held={key(0): b""})
    async with stack_of(disk) as stack:
        assert await load(stack, "disk", range(1)) == []
        assert not stack.host.holds(key(0))
        assert stack.stats()["disk"].errors == 1


async def test_when_every_slot_is_pinned_a_load_is_a_miss():
    disk = tier_with(5)
    async with stack_of(disk, slots=2) as stack:
        put(stack.host, key(0), payload(0))
        put(stack.host, key(1), payload(1))
        stack.host.pin(keys(0, 1))
        assert await load(stack, "disk", range(5, 6)) == []
        stack.host.unpin(keys(0, 1))
        assert await load(stack, "disk", range(5, 6)) == [5]


async def test_without_a_host_tier_blocks_pass_through_staging():
    disk = tier_with(*range(100, 140))
    stack = TierStack(RegionPool(POOL), 0, [disk], StorePolicy.WRITE_THROUGH)
    for i in range(4):
        assert commit(stack, i)
    await until(lambda: key(3) in disk.held)
    assert await stack.lookup(keys(0, 1)) == [Held("disk", 0, 2)]
    assert await load(stack, "disk", range(100, 140)) == list(range(100, 140))
    assert list(stack.stats()) == ["disk"]
    await stack.close()


@pytest.mark.parametrize("policy", StorePolicy)
async def test_without_a_host_tier_what_was_computed_is_stored_at_once(policy):
    disk = FakeTier("disk")
    stack = TierStack(RegionPool(POOL), 0, [disk], policy)
    for i in range(300):  # more than the staging arena has slots
        commit(stack, i)
        await until(lambda i=i: key(i) in disk.held)
    stack.touch(keys(*range(300)))
    assert await stack.lookup(keys(*range(300))) == [Held("disk", 0, 300)]
    assert stack.stats()["disk"].dropped == 0
    await stack.close()


async def test_unequal_lengths_are_a_mistake():
    async with stack_of() as stack:
        with pytest.raises(ValueError, match="2 blocks cannot fill 1 of the pool"):
            await stack.load("host", keys(0, 1), targets(1), lambda count: None)


# The setting.


@pytest.mark.parametrize(
    ("setting", "names"),
    [("host,disk,redis", ("host", "disk", "redis")), (" redis , disk", ("redis", "disk")), ("", ())],
)
def test_order_of_tiers(setting, names):
    assert parse_order(setting) == names


@pytest.mark.parametrize(
    ("setting", "sentence"),
    [
        ("host,nvme", "tier 'nvme' is not known; known tiers: host, disk, redis"),
        ("host,disk,disk", "tier 'disk' stands twice"),
        ("disk,host", "name it first"),
    ],
)
def test_an_order_that_cannot_work_is_refused(setting, sentence):
    with pytest.raises(ConfigError, match=sentence):
        parse_order(setting)
