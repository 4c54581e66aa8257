import asyncio
import random
import threading
from collections import Counter
from contextlib import asynccontextmanager

import pytest

from core.clock import FakeClock
from core.errors import ConfigError
from kvtransfer.rates import FORGET_AFTER_S, Rate, RateMeter
from kvtransfer.store_policy import StorePolicy
from kvtransfer.tier import FakeTier
from kvtransfer.tier_stack import Held, TierStack, parse_order

NBYTES = 4096


def key(i: int) -> bytes:
    return i.to_bytes(32, "big")


def keys(*ids: int) -> list[bytes]:
    return [key(i) for i in ids]


def payload(i: int) -> memoryview:
    """The bytes that belong to `key(i)`."""
    return memoryview(i.to_bytes(8, "big") * (NBYTES // 8))


def buffers(count: int) -> list[memoryview]:
    return [memoryview(bytearray(NBYTES)) for _ in range(count)]


def tier_with(*ids: int, name: str = "disk") -> FakeTier:
    return FakeTier(name, held={key(i): bytes(payload(i)) for i in ids})


@asynccontextmanager
async def stack_of(*tiers: FakeTier, slots: int = 64, policy=StorePolicy.WRITE_THROUGH, **options):
    stack = TierStack(NBYTES, slots * NBYTES, tiers, policy, **options)
    try:
        yield stack
    finally:
        for tier in tiers:
            tier.release()
        await stack.close()
        stack.host.check()


async def until(condition, timeout_s: float = 10.0) -> None:
    async with asyncio.timeout(timeout_s):
        while not condition():
            await asyncio.sleep(0.002)


async def load(stack: TierStack, source: str, ids: range, **options) -> list[int]:
    """Loads and checks every byte; the ids of the blocks that came."""
    into, arrived = buffers(len(ids)), []
    count = await stack.load(source, keys(*ids), into, arrived.append, **options)
    assert into[:count] == [payload(i) for i in ids[:count]]
    assert arrived == sorted(set(arrived))
    assert (arrived[-1] if arrived else 0) == count
    return list(ids[:count])


# Looking up.


async def test_each_tier_adds_what_those_above_lack():
    disk, redis = tier_with(2, 3, 4), tier_with(0, 1, 2, 5, 6, 9, name="redis")
    async with stack_of(disk, redis) as stack:
        stack.committed(key(0), payload(0))
        stack.committed(key(1), payload(1))
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
        stack.committed(key(1), payload(1))
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
        into, arrived = buffers(4), []
        gone = asyncio.create_task(stack.load("disk", keys(*range(4)), into, arrived.append))
        stays = asyncio.create_task(load(stack, "disk", range(4)))
        await until(lambda: disk.loads)
        gone.cancel()
        with pytest.raises(asyncio.CancelledError):
            await gone
        disk.release()
        assert await stays == [0, 1, 2, 3]
        assert into == buffers(4)
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
    """Computing four blocks would take 4 s, waiting for them costs a few percent of that."""
    disk = tier_with(*range(4))
    async with stack_of(disk, load_timeout_s=60.0) as stack:
        disk.stick()
        async with asyncio.timeout(2.0):
            assert await load(stack, "disk", range(4), block_budget_s=1.0) == []
        disk.release()


async def test_a_silent_tier_costs_one_timeout_and_its_blocks_are_a_miss():
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
        stack.host.put(key(0), payload(0))
        stack.host.put(key(1), payload(1))
        stack.host.pin(keys(0, 1))
        assert await load(stack, "disk", range(5, 6)) == []
        stack.host.unpin(keys(0, 1))
        assert await load(stack, "disk", range(5, 6)) == [5]


async def test_without_a_host_tier_blocks_pass_through_staging():
    disk = tier_with(*range(100, 140))
    stack = TierStack(NBYTES, 0, [disk], StorePolicy.WRITE_THROUGH)
    for i in range(4):
        assert stack.committed(key(i), payload(i))
    await until(lambda: key(3) in disk.held)
    assert await stack.lookup(keys(0, 1)) == [Held("disk", 0, 2)]
    assert await load(stack, "disk", range(100, 140)) == list(range(100, 140))
    assert list(stack.stats()) == ["disk"]
    await stack.close()


async def test_unequal_lengths_are_a_mistake():
    async with stack_of() as stack:
        with pytest.raises(ValueError, match="2 blocks cannot fill 1 buffers"):
            await stack.load("host", keys(0, 1), buffers(1), lambda count: None)


# Storing.


async def test_what_a_tier_lost_is_stored_again_once_it_was_computed_again():
    disk = FakeTier("disk")
    async with stack_of(disk) as stack:
        for _ in range(2):
            assert stack.committed(key(0), payload(0))
            await until(lambda: key(0) in disk.held)
            del disk.held[key(0)]


async def test_a_stuck_tier_does_not_delay_a_commit():
    """The engine's thread commits everything while the tier's store never returns."""
    disk = FakeTier("disk")
    async with stack_of(disk, slots=32) as stack:
        disk.stick()
        committed = []

        def engine() -> None:
            committed.extend(stack.committed(key(i), payload(i)) for i in range(100))

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
            stack.committed(key(i), payload(i))
        assert stack.stats()["disk"].dropped == 7


async def test_one_stuck_tier_does_not_starve_the_other():
    disk, redis = FakeTier("disk"), FakeTier("redis")
    async with stack_of(disk, redis) as stack:
        disk.stick()
        for i in range(3):
            stack.committed(key(i), payload(i))
        await until(lambda: len(redis.held) == 3)
        assert disk.held == {}


@pytest.mark.parametrize("trouble", ["full", "broken"])
async def test_a_tier_without_space_loses_nothing_but_the_store(trouble):
    disk = FakeTier("disk")
    async with stack_of(disk) as stack:
        setattr(disk, trouble, True)
        assert stack.committed(key(0), payload(0))
        await until(lambda: stack.stats()["disk"].dropped == 1)
        assert await load(stack, "host", range(1)) == [0]
        setattr(disk, trouble, False)
        stack.touch(keys(0))  # the next use offers it again
        await until(lambda: disk.held == {key(0): bytes(payload(0))})


async def test_second_hit_stores_what_was_used_twice():
    disk = FakeTier("disk")
    async with stack_of(disk, policy=StorePolicy.SECOND_HIT) as stack:
        for i in range(6):
            stack.committed(key(i), payload(i))
        stack.committed(key(0), payload(0))
        await load(stack, "host", range(1, 3))
        stack.touch(keys(3, 77))  # 77 is in the device's pool only: nothing to store it from
        stack.touch(keys(3, 77))
        await until(lambda: len(disk.held) == 4)
        assert stack.stats()["disk"].dropped == 0
    assert sorted(disk.held) == keys(0, 1, 2, 3)


async def test_on_evict_stores_what_leaves_the_host_tier():
    disk = FakeTier("disk")
    async with stack_of(disk, slots=16, policy=StorePolicy.ON_EVICT) as stack:
        for i in range(100):
            stack.committed(key(i), payload(i))
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
            stack.committed(key(i), payload(i))
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
            assert stack.committed(key(i), payload(i))
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
            first.committed(key(i), payload(i))
    async with stack_of(FakeTier("redis", held=redis.held)) as second:
        assert await second.lookup(keys(*range(6))) == [Held("redis", 0, 5)]
        assert await load(second, "redis", range(5)) == list(range(5))


# Everything at once.


async def test_random_traffic_never_gives_foreign_bytes_and_leaves_no_pin():
    """Commits, loads, cancels and faults over an arena much smaller than what is asked for."""
    rng = random.Random(5)
    disk, redis = tier_with(*range(64)), tier_with(*range(32, 96), name="redis")
    async with stack_of(disk, redis, slots=40, load_timeout_s=0.05) as stack:
        stopped = threading.Event()

        def engine() -> None:
            own = random.Random(6)
            while not stopped.is_set():
                block = own.randrange(200)
                stack.committed(key(block), payload(block))
                stack.touch(keys(block, block + 1))

        thread = threading.Thread(target=engine)
        thread.start()
        outcomes: Counter[str] = Counter()

        async def client(first: int, count: int, source: str, patience_s: float) -> None:
            try:
                async with asyncio.timeout(patience_s):
                    came = await load(stack, source, range(first, first + count))
                outcomes["all" if len(came) == count else "some"] += 1
            except TimeoutError:
                outcomes["cancelled"] += 1

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
        assert min(outcomes[kind] for kind in ("all", "some", "cancelled")) > 0
        await until(lambda: len(stack.host.take(stack.host.num_slots)) == stack.host.num_slots)


# Ending.


async def test_close_stores_what_is_queued_and_ends_the_threads():
    disk = FakeTier("disk")
    stack = TierStack(NBYTES, 32 * NBYTES, [disk], StorePolicy.WRITE_THROUGH)
    for i in range(8):
        stack.committed(key(i), payload(i))
    await stack.close()
    await stack.close()
    assert len(disk.held) == 8
    assert disk.closed
    assert not stack.committed(key(9), payload(9))
    stack.touch(keys(0))
    assert await stack.lookup(keys(0)) == [Held("host", 0, 1)]
    assert await load(stack, "disk", range(1)) == []
    assert not any(thread.name == "kv-tiers" for thread in threading.enumerate())


async def test_close_does_not_wait_for_a_stuck_tier():
    disk = tier_with(7)
    stack = TierStack(NBYTES, 32 * NBYTES, [disk], StorePolicy.WRITE_THROUGH)
    disk.stick()
    stack.committed(key(0), payload(0))
    loading = asyncio.create_task(load(stack, "disk", range(7, 8)))
    await until(lambda: disk.loads)
    await stack.close(drain_s=0.01)
    with pytest.raises(asyncio.CancelledError):
        await loading


# Values.


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


def test_rate_tells_latency_from_bandwidth():
    meter = RateMeter(Rate(0.001, 1e9), FakeClock(100.0))
    for nbytes in (10**6, 10**7, 10**8) * 3:
        meter.add(nbytes, 0.005 + nbytes / 2e8)
    rate = meter.rate(queued_nbytes=10**7)
    assert rate.measured
    assert rate.latency_s == pytest.approx(0.005, rel=1e-3)
    assert rate.nbytes_per_s == pytest.approx(2e8, rel=1e-3)
    assert rate.seconds(10**7) == pytest.approx(0.105, rel=1e-3)
    assert rate.seconds(0) == 0


def test_rate_follows_a_tier_that_became_slow():
    meter = RateMeter(Rate(0.001, 1e9), FakeClock(100.0))
    for _ in range(20):
        meter.add(10**7, 0.01)
    for _ in range(6):
        meter.add(10**7, 0.1)
    assert meter.rate().nbytes_per_s < 1.5e8


def test_rate_is_forgotten_so_that_a_slow_tier_gets_another_try():
    clock, guess = FakeClock(100.0), Rate(0.001, 1e9)
    meter = RateMeter(guess, clock)
    assert meter.rate() == guess
    meter.add(10**6, 1.0)
    assert meter.rate().nbytes_per_s == pytest.approx(1e6)
    clock.advance(FORGET_AFTER_S + 1)
    assert meter.rate() == guess
    meter.add(10**6, 0.01)
    assert meter.rate().nbytes_per_s == pytest.approx(1e8)
