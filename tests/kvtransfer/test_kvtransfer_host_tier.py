import random
import threading
from collections.abc import Sequence

import pytest
from host_slots import fill, put
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from core.errors import ConfigError
from kvtransfer import arena
from kvtransfer.host_tier import HostTier

NBYTES = 4096


def key(i: int) -> bytes:
    return i.to_bytes(32, "big")


def payload(i: int) -> memoryview:
    """The bytes that belong to `key(i)`."""
    return memoryview(i.to_bytes(8, "big") * (NBYTES // 8))


def buffers(count: int) -> list[memoryview]:
    return [memoryview(bytearray(NBYTES)) for _ in range(count)]


def host_of(slots: int) -> HostTier:
    return HostTier(slots * NBYTES, NBYTES)


def held(host: HostTier, ids: Sequence[int]) -> list[int]:
    return [i for i in ids if host.holds(key(i))]


def test_put_then_load():
    host = host_of(4)
    assert all(put(host, key(i), payload(i)) for i in range(3))
    into = buffers(4)
    assert host.lookup([key(i) for i in range(4)]) == 3
    assert host.load([key(i) for i in range(4)], fill(into)) == 3
    assert [bytes(b) for b in into[:3]] == [bytes(payload(i)) for i in range(3)]
    stats = host.stats()
    assert (stats.queries, stats.hits, stats.num_blocks) == (4, 3, 3)
    assert (stats.store_nbytes, stats.load_nbytes) == (3 * NBYTES, 3 * NBYTES)
    assert (stats.used_nbytes, stats.capacity_nbytes) == (3 * NBYTES, 4 * NBYTES)


def test_held_block_is_not_copied_again():
    host = host_of(2)
    put(host, key(1), payload(1))
    assert put(host, key(1), payload(7))
    into = buffers(1)
    host.load([key(1)], fill(into))
    assert into[0] == payload(1)
    assert host.stats().store_nbytes == NBYTES


def test_least_recently_used_goes_first():
    host, evicted = host_of(3), []
    host.on_evict = evicted.append
    for i in range(3):
        put(host, key(i), payload(i))
    host.lookup([key(0)])
    put(host, key(3), payload(3))
    assert evicted == [key(1)]
    assert host.stats().evictions == 1


@pytest.mark.parametrize("use", ["touch", "lookup", "load", "pin"])
def test_a_chain_is_evicted_from_its_tail(use):
    host = host_of(4)
    chain = [key(i) for i in range(4)]
    for i in range(4):
        put(host, key(i), payload(i))
    match use:
        case "touch":
            host.touch(chain)
        case "lookup":
            host.lookup(chain)
        case "load":
            host.load(chain, fill(buffers(4)))
        case "pin":
            host.unpin(chain[: host.pin(chain)])
    left = []
    for i in range(4, 7):
        put(host, key(i), payload(i))
        left.append(held(host, range(4)))
    assert left == [[0, 1, 2], [0, 1], [0]]


def test_pinned_blocks_stay_and_pins_are_counted():
    host = host_of(2)
    put(host, key(0), payload(0))
    put(host, key(1), payload(1))
    assert host.pin([key(0), key(1), key(2)]) == 2
    assert host.pin([key(0)]) == 1
    assert not put(host, key(3), payload(3))
    assert host.stats().dropped == 1
    host.unpin([key(0), key(1)])
    assert not host.evict(key(0))
    assert put(host, key(3), payload(3))
    assert held(host, range(4)) == [0, 3]
    host.unpin([key(0)])
    with pytest.raises(AssertionError, match="more often than pinned"):
        host.unpin([key(0)])


def test_landing_slots_are_not_found_before_they_are_published():
    host = host_of(3)
    slots = host.take(3)
    assert host.take(1) == []
    host.slot(slots[0])[:] = payload(5)
    assert not host.holds(key(5))
    host.publish([key(5)], slots[:1])
    host.give_back(slots[1:])
    into = buffers(1)
    assert host.load([key(5)], fill(into)) == 1
    assert into[0] == payload(5)
    host.check()


def test_a_double_keeps_the_first_and_frees_the_second():
    host = host_of(2)
    slots = host.take(1)
    put(host, key(1), payload(1))
    host.slot(slots[0])[:] = payload(9)
    host.publish([key(1)], slots)
    into = buffers(1)
    host.load([key(1)], fill(into))
    assert into[0] == payload(1)
    assert host.num_free == 1
    host.check()


def test_coldest_are_pinned_and_evicted_on_request():
    host = host_of(4)
    for i in range(4):
        put(host, key(i), payload(i))
    coldest = host.pin_coldest(2)
    assert coldest == [key(0), key(1)]
    assert not host.evict(key(0))
    host.unpin(coldest)
    assert host.evict(key(0))
    assert not host.evict(key(0))
    assert host.num_free == 1


def test_a_reader_that_fails_leaves_no_pin():
    def broken(payloads: Sequence[memoryview]) -> None:
        raise OSError("broken")

    host = host_of(1)
    put(host, key(0), payload(0))
    with pytest.raises(OSError, match="broken"):
        host.load([key(0)], broken)
    assert put(host, key(1), payload(1))


def test_of_a_chain_the_missing_blocks_are_reserved_as_far_as_there_is_room():
    """1. Block 1 of 0 to 3 is held, another is pinned, one slot is free.  2. Blocks 0, 2 and 3 are missing: there is
    room for 0, block 1 counts as just used and goes all the same, for 2.  3. Block 3 is given up."""
    host = host_of(3)
    put(host, key(1), payload(1))
    put(host, key(9), payload(9))
    assert host.pin([key(9)]) == 1
    missing, slots = host.reserve([key(i) for i in range(4)])
    assert (missing, len(slots), host.stats().dropped) == ([0, 2], 2, 1)
    assert host.reserve([key(5)]) == ([], [])
    host.give_back(slots)
    host.unpin([key(9)])
    host.check()


def test_sizes_that_cannot_work_are_said_so(monkeypatch):
    with pytest.raises(ConfigError, match="not even one block of 4096 bytes"):
        HostTier(NBYTES - 1, NBYTES)
    monkeypatch.setattr(arena, "available_nbytes", lambda: 2**20)
    with pytest.raises(ConfigError, match="needs 2 MiB and only 1 MiB are free"):
        HostTier(2**21, NBYTES)


class HostTierMachine(RuleBasedStateMachine):
    """Any order of operations of one thread: slots are conserved, content is right, pins count."""

    ids = st.integers(0, 11)
    chains = st.lists(ids, max_size=5, unique=True)

    def __init__(self) -> None:
        super().__init__()
        self.host = host_of(6)
        self.pinned: list[list[bytes]] = []
        self.taken: list[list[int]] = []

    @rule(i=ids)
    def put(self, i):
        assert put(self.host, key(i), payload(i)) == self.host.holds(key(i))

    @rule(chain=chains)
    def load(self, chain):
        hashes, into = [key(i) for i in chain], buffers(len(chain))
        count = self.host.lookup(hashes)
        assert self.host.load(hashes, fill(into)) == count
        assert into[:count] == [payload(i) for i in chain[:count]]

    @rule(chain=chains)
    def pin(self, chain):
        hashes = [key(i) for i in chain]
        self.pinned.append(hashes[: self.host.pin(hashes)])

    @rule()
    def unpin(self):
        if self.pinned:
            self.host.unpin(self.pinned.pop())

    @rule(i=ids)
    def evict(self, i):
        was_pinned = any(key(i) in hashes for hashes in self.pinned)
        assert not (self.host.evict(key(i)) and was_pinned)

    @rule(count=st.integers(1, 4))
    def take(self, count):
        if slots := self.host.take(count):
            assert len(slots) == count
            self.taken.append(slots)

    @rule(chain=st.lists(ids, min_size=4, max_size=4, unique=True), filled=st.integers(0, 4))
    def land(self, chain, filled):
        if self.taken:
            slots = self.taken.pop()
            filled = min(filled, len(slots))
            for i, slot in zip(chain[:filled], slots[:filled], strict=True):
                self.host.slot(slot)[:] = payload(i)
            self.host.publish([key(i) for i in chain[:filled]], slots[:filled])
            self.host.give_back(slots[filled:])

    @invariant()
    def books_are_right(self):
        self.host.check()
        assert all(self.host.holds(h) for hashes in self.pinned for h in hashes)
        filling = sum(map(len, self.taken))
        assert self.host.num_free + self.host.stats().num_blocks + filling == self.host.num_slots


HostTierMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestHostTierInvariants = HostTierMachine.TestCase


def test_threads_never_see_foreign_bytes():
    """Four threads put, load, land and evict far more blocks than there are slots."""
    host, foreign = host_of(16), []

    def work(seed: int) -> None:
        rng = random.Random(seed)
        into = buffers(4)
        for _ in range(1500):
            chain = rng.sample(range(48), 4)
            hashes = [key(i) for i in chain]
            action = rng.randrange(4)
            if action == 0:
                put(host, hashes[0], payload(chain[0]))
            elif action == 1:
                count = host.load(hashes, fill(into))
                foreign.extend(i for i, b in zip(chain, into[:count], strict=False) if b != payload(i))
            elif action == 2 and (slots := host.take(2)):
                for i, slot in zip(chain, slots, strict=False):
                    host.slot(slot)[:] = payload(i)
                host.publish(hashes[:2], slots)
            else:
                host.evict(hashes[0])

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not foreign
    host.check()
    assert host.num_free + host.stats().num_blocks == host.num_slots
    assert len(host.take(host.num_slots)) == host.num_slots  # no pin is left
