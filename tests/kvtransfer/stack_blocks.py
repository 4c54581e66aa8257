"""Tier stacks over fakes, and blocks whose bytes follow from their number."""

import asyncio
import itertools
from contextlib import asynccontextmanager

from kvtransfer.region import Region
from kvtransfer.store_policy import StorePolicy
from kvtransfer.tier import FakeTier
from kvtransfer.tier_pool import RegionPool
from kvtransfer.tier_stack import TierStack

NBYTES = 4096
POOL = Region.create(512, NBYTES, "tests")
"""Of every stack here: block i holds what belongs to `key(i)` once it was committed."""
LOADED = 256
"""Blocks of the pool from here on are what tests load into."""
_targets = itertools.cycle(range(LOADED, POOL.num_blocks))


def key(i: int) -> bytes:
    return i.to_bytes(32, "big")


def keys(*ids: int) -> list[bytes]:
    return [key(i) for i in ids]


def payload(i: int) -> memoryview:
    """The bytes that belong to `key(i)`."""
    return memoryview(i.to_bytes(8, "big") * (NBYTES // 8))


def targets(count: int) -> list[int]:
    """Ids of so many blocks to load into, zeros now; the next calls give others."""
    ids = [next(_targets) for _ in range(count)]
    for i in ids:
        POOL.block(i)[:] = bytes(NBYTES)
    return ids


def commit(stack: TierStack, i: int) -> bool:
    """The engine commits block i; whether the host tier holds it then."""
    POOL.block(i)[:] = payload(i)
    stack.committed([key(i)], [i])
    return stack.host.holds(key(i))


def tier_with(*ids: int, name: str = "disk") -> FakeTier:
    return FakeTier(name, held={key(i): bytes(payload(i)) for i in ids})


@asynccontextmanager
async def stack_of(*tiers: FakeTier, slots: int = 64, policy=StorePolicy.WRITE_THROUGH, **options):
    stack = TierStack(RegionPool(POOL), slots * NBYTES, tiers, policy, **options)
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
    into, arrived = targets(len(ids)), []
    count = await stack.load(source, keys(*ids), into, arrived.append, **options)
    assert [POOL.block(i) for i in into[:count]] == [payload(i) for i in ids[:count]]
    assert arrived == sorted(set(arrived))
    assert (arrived[-1] if arrived else 0) == count
    return list(ids[:count])
