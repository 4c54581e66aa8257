import asyncio

import pytest
from host_slots import put

from kvtransfer.host_tier import HostTier
from kvtransfer.store_policy import Admission, StorePolicy
from kvtransfer.tier import FakeTier
from kvtransfer.write_behind import WriteBehind

A, B, C = (letter * 32 for letter in (b"a", b"b", b"c"))


@pytest.mark.parametrize(
    ("policy", "uses", "due"),
    [
        (StorePolicy.WRITE_THROUGH, [[A, B], [A], [B, C]], [[A, B], [], [C]]),
        (StorePolicy.SECOND_HIT, [[A, B], [A], [B, C], [A, B, C]], [[], [A], [B], [C]]),
        (StorePolicy.ON_EVICT, [[A], [A], [A]], [[], [], []]),
    ],
)
def test_what_is_stored_and_when(policy, uses, due):
    admission = Admission(policy)
    assert [admission.used(hashes) for hashes in uses] == due


def test_what_had_to_be_computed_again_is_stored_again():
    """A tier lost it, or nobody would have computed it."""
    admission = Admission(StorePolicy.SECOND_HIT)
    uses = [admission.used([A], computed=True) for _ in range(4)]
    assert uses == [[], [A], [A], [A]]
    assert admission.used([A]) == []
    assert Admission(StorePolicy.ON_EVICT).used([A], computed=True) == []


@pytest.mark.parametrize("policy", [StorePolicy.WRITE_THROUGH, StorePolicy.SECOND_HIT])
def test_a_store_that_failed_is_asked_for_at_the_next_use(policy):
    admission = Admission(policy)
    while not admission.used([A]):
        pass
    admission.not_stored(A)
    assert admission.used([A]) == [A]
    assert admission.used([A]) == []


def test_memory_is_bounded_and_the_longest_unused_is_forgotten():
    admission = Admission(StorePolicy.SECOND_HIT, limit=2)
    admission.used([A, B])
    admission.used([C])
    assert len(admission) == 2
    assert admission.used([A]) == []  # forgotten, so this is its first use; B goes
    assert admission.used([C]) == [C]


def test_names_are_those_of_the_setting():
    assert [str(policy) for policy in StorePolicy] == ["write-through", "second-hit", "on-evict"]


async def test_queue_takes_so_many_and_counts_what_it_refuses():
    host, tier = HostTier(8 * 64, 64), FakeTier()
    for i in range(6):
        assert put(host, bytes([i]) * 32, memoryview(bytes([i]) * 64))
    hashes = [bytes([i]) * 32 for i in range(6)]
    done: list[tuple[bytes, ...]] = []
    writer = WriteBehind(
        tier, host, asyncio.get_running_loop(), 4, lambda h, stored: done.append((*h, b"%d" % stored))
    )
    tier.stick()
    running = asyncio.create_task(writer.run())
    assert [writer.offer(h) for h in hashes] == [True] * 4 + [False] * 2
    assert writer.offer(hashes[0])  # queued already: no second time
    assert (writer.room, writer.dropped) == (0, 2)
    assert not await writer.drained(0.01)
    tier.release()
    assert await writer.drained(5)
    assert done == [(*hashes[:4], b"4")]
    assert tier.held == {h: h[:1] * 64 for h in hashes[:4]}
    assert writer.room == 4
    host.check()
    assert host.take(8) != []  # no pin is left
    running.cancel()


async def test_a_block_that_the_host_let_go_is_dropped():
    host = HostTier(64, 64)
    writer = WriteBehind(FakeTier(), host, asyncio.get_running_loop(), 4, lambda h, stored: None)
    assert not writer.offer(A)
    assert writer.dropped == 1


async def test_a_tier_that_raises_is_a_tier_that_failed():
    class Raising(FakeTier):
        async def store(self, blocks):
            raise OSError("no such disk")

    host, stored = HostTier(2 * 64, 64), []
    put(host, A, memoryview(bytes(64)))
    writer = WriteBehind(
        Raising(), host, asyncio.get_running_loop(), 4, lambda hashes, count: stored.append(count)
    )
    running = asyncio.create_task(writer.run())
    writer.offer(A)
    assert await writer.drained(5)
    assert (stored, writer.errors) == ([0], 1)
    assert not running.done()
    running.cancel()


async def test_whatever_goes_wrong_with_a_batch_the_next_one_is_stored():
    host, tier, told = HostTier(2 * 64, 64), FakeTier(), []

    def tell(hashes, stored):
        told.append(stored)
        if len(told) == 1:
            raise ValueError("a bug")

    writer = WriteBehind(tier, host, asyncio.get_running_loop(), 4, tell)
    running = asyncio.create_task(writer.run())
    for block_hash in (A, B):
        put(host, block_hash, memoryview(bytes(64)))
        assert writer.offer(block_hash)
        assert await writer.drained(5)
    assert (told, writer.errors, set(tier.held)) == ([1, 1], 1, {A, B})
    assert len(host.take(2)) == 2  # no pin is left
    running.cancel()
