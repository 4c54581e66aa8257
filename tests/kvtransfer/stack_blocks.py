"""Tier stacks over fakes, and blocks whose bytes follow from their number."""

import asyncio
from contextlib import asynccontextmanager

from kvtransfer.store_policy import StorePolicy
from kvtransfer.tier import FakeTier
from kvtransfer.tier_stack import TierStack

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
