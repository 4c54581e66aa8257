"""Blocks that live on outside the pool: loaded for requests and jobs, parked for whoever is preempted."""

from __future__ import annotations

import random

import pytest
from hash_model import Harness, HashRunner, expected, random_prompt

from core.blocks import hash_blocks
from engine.messages import (
    Abort,
    AddPrefill,
    BlocksArrived,
    BlocksBuilt,
    LoadFinished,
    LoadOrdered,
    LoadReport,
)
from engine.sequence import PrefillJob


class MemoryStore:
    """A tier in memory beside the hash model; counts what is parked."""

    def __init__(self, blocks: dict[bytes, list[tuple[int, int] | None]]) -> None:
        self.blocks, self.parked = blocks, []
        self.num_copied = 0
        self.hit: list[list[bytes]] = []
        self.runner: HashRunner

    def committed(self, hashes, block_ids, num_from_store: int) -> None:
        assert all(block_hash in self.blocks for block_hash in hashes[:num_from_store])
        self.num_copied += len(hashes) - num_from_store
        size = self.runner.size
        for block_hash, block_id in zip(hashes, block_ids, strict=True):
            self.blocks.setdefault(block_hash, self.runner.slots[block_id * size : (block_id + 1) * size])

    def evicted(self, block_hash: bytes) -> None: ...

    def touched(self, hashes) -> None:
        self.hit.append(list(hashes))

    def released(self, hashes) -> None: ...

    def park(self, hashes) -> int:
        held = 0
        for block_hash in hashes:
            if block_hash not in self.blocks:
                break
            self.parked.append(block_hash)
            held += 1
        return held

    def unpark(self, hashes) -> None:
        for block_hash in hashes:
            self.parked.remove(block_hash)

    def fill(self, order: LoadOrdered, count: int) -> None:
        """Bring the first `count` blocks of an order."""
        size = self.runner.size
        for block_hash, block_id in list(zip(order.hashes, order.block_ids, strict=True))[:count]:
            self.runner.slots[block_id * size : (block_id + 1) * size] = self.blocks[block_hash]


@pytest.fixture
def stored(harness):
    """A factory of (harness, store) pairs."""

    def make(store: MemoryStore | None = None, **given):
        mine = MemoryStore(dict(store.blocks) if store else {})
        h = harness(store=mine, **given)
        mine.runner = h.runner
        return h, mine

    return make


def orders(h: Harness) -> list[LoadOrdered]:
    return [e for e in h.events if isinstance(e, LoadOrdered)]


@pytest.mark.parametrize("arrived", [0, 2, 4])
def test_a_request_takes_what_a_tier_holds(stored, arrived: int) -> None:
    first, kept = stored(block_size=8)
    prompt = random_prompt(37)
    first.add("warm", prompt, 1)
    first.run()
    h, store = stored(kept, block_size=8)
    h.add("r", prompt, 6, num_held=4)
    assert not h.step(), "nothing is computed while blocks arrive"
    (order,) = orders(h)
    assert (order.first_block, len(order.block_ids), len(order.hashes)) == (0, 4, 4)
    store.fill(order, arrived)
    h.engine.handle(LoadFinished("r/0", LoadReport(arrived, by_tier=(("host", arrived),), plan="host")))
    h.run()
    assert h.tokens("r") == expected(prompt, 6)
    gathered = h.gathered("r")
    assert gathered.tier_tokens == (("host", 8 * arrived),)
    assert (gathered.remote_tokens, gathered.computed_tokens) == (0, 37 - 8 * arrived)
    assert gathered.source_plan == "host"
    assert store.num_copied == 5 - arrived, "what came out of the store is not stored again"


@pytest.mark.parametrize("arrived", [0, 2, 4])
def test_a_block_that_two_want_is_loaded_for_both_at_once(stored, arrived: int) -> None:
    """1. One request loads four blocks.  2. Another with the same three first waits for these, takes no blocks
    of the pool, and a third one with a prompt of its own goes on.  3. What arrived is shared; the second asks
    for what did not come."""
    first, kept = stored(block_size=8)
    prompt = random_prompt(37)
    other = prompt[:26] + random_prompt(20, 7)
    first.add("warm", prompt, 1)
    first.run()
    h, store = stored(kept, block_size=8)
    h.add("r", prompt, 6, num_held=4)
    h.step()
    free = h.pool.num_free
    h.add("s", other, 6, num_held=3)
    assert not h.step()
    assert h.pool.num_free == free
    h.add("t", random_prompt(9, 5), 3)
    while h.step():
        pass
    assert h.tokens("t") == expected(random_prompt(9, 5), 3)
    (order,) = orders(h)
    store.fill(order, arrived)
    h.engine.handle(BlocksArrived(order.load_id, min(arrived, 2), min(arrived, 2)))
    assert not h.step(), "the third block is still on its way"
    h.engine.handle(LoadFinished("r/0", LoadReport(arrived, by_tier=(("host", arrived),))))
    h.run()
    assert h.tokens("r") == expected(prompt, 6)
    later = orders(h)[1:]
    assert [len(each.block_ids) for each in later] == ([] if arrived == 4 else [3 - arrived])
    for each in later:
        h.engine.handle(LoadFinished(each.load_id, LoadReport(0)))
    h.run()
    assert h.tokens("s") == expected(other, 6)
    assert h.gathered("s").cached_tokens == 8 * min(arrived, 3)


def test_what_the_pool_holds_or_nobody_holds_is_not_ordered(stored) -> None:
    h, _ = stored(block_size=8)
    prompt = random_prompt(37)
    h.add("warm", prompt, 1)
    h.run()
    h.add("same", prompt, 2, num_held=4)
    h.add("logprobs", prompt, 2, num_held=4, prompt_logprobs=True, logprobs=1)
    h.add("nothing", random_prompt(37, 5), 2, num_held=0)
    h.run()
    assert not orders(h)


def test_a_job_publishes_what_arrives_and_computes_the_rest(stored) -> None:
    first, kept = stored(block_size=8)
    tokens = tuple(random_prompt(48))
    first.engine.handle(AddPrefill(PrefillJob("warm", tokens)))
    while first.step():
        pass
    first.engine.handle(Abort("warm"))
    h, store = stored(kept, block_size=8, max_num_batched_tokens=8)
    h.engine.handle(AddPrefill(PrefillJob("job", tokens), num_held=4))
    h.step()
    (order,) = orders(h)
    store.fill(order, 3)
    h.engine.handle(BlocksArrived("job", 2))
    h.step()
    built = [e for e in h.events if isinstance(e, BlocksBuilt)]
    assert [(e.first, len(e.block_ids)) for e in built] == [(0, 2)]
    h.engine.handle(LoadFinished("job", LoadReport(3)))
    while h.step():
        pass
    built = [e for e in h.events if isinstance(e, BlocksBuilt)]
    assert [i for e in built for i in range(e.first, e.first + len(e.block_ids))] == list(range(6))
    assert [len(e.block_ids) for e in built if e.cached] == [2, 1]
    h.engine.handle(Abort("job"))


def test_a_job_that_a_tier_holds_whole_is_held_without_a_step(stored) -> None:
    first, kept = stored(block_size=8)
    tokens = tuple(random_prompt(16))
    first.engine.handle(AddPrefill(PrefillJob("warm", tokens)))
    while first.step():
        pass
    first.engine.handle(Abort("warm"))
    h, store = stored(kept, block_size=8)
    h.engine.handle(AddPrefill(PrefillJob("job", tokens), num_held=2))
    h.step()
    store.fill(orders(h)[0], 2)
    h.engine.handle(LoadFinished("job", LoadReport(2)))
    h.step()
    assert list(h.scheduler.books.held) == ["job"]
    assert h.runner.tokens_computed == 0
    h.engine.handle(Abort("job"))


@pytest.mark.parametrize("swap", [True, False])
def test_a_preempted_sequence_is_parked_and_goes_on_as_if_nothing_had_been(stored, swap: bool) -> None:
    """1. Two sequences outgrow the pool. 2. The younger is preempted, its blocks stay parked.
    3. Taken up again, it loads them (or not: then it computes them). 4. Same tokens, nothing parked."""
    h, store = stored(num_blocks=12, block_size=8)
    prompts = {"a": random_prompt(30, 1), "b": random_prompt(30, 2)}
    for name, prompt in prompts.items():
        h.add(name, prompt, 40)
    seen, most_parked = 0, 0
    for _ in range(500):
        h.step()
        most_parked = max(most_parked, len(store.parked))
        for order in orders(h)[seen:]:
            seen += 1
            count = len(order.block_ids) if swap else 0
            store.fill(order, count)
            h.engine.handle(LoadFinished(order.load_id, LoadReport(count, by_tier=(("host", count),))))
    assert h.scheduler.num_preempted
    assert seen
    assert most_parked
    assert not store.parked
    assert store.hit == [[], []], "coming back is no use of the blocks"
    for name, prompt in prompts.items():
        assert h.tokens(name) == expected(prompt, 40)


def test_choices_of_one_request_load_each_for_itself(stored) -> None:
    """1. Four choices outgrow the pool. 2. Two are preempted and load at the same time. 3. None is mixed up."""
    h, store = stored(num_blocks=16, block_size=8)
    prompt = random_prompt(20, 3)
    h.add("r", prompt, 40, n=4, temperature=1.0, seed=3)
    seen, at_once = 0, 0
    for _ in range(1500):
        h.step()
        at_once = max(at_once, len(h.scheduler.books.loading))
        if len(h.scheduler.books.loading) == 2 or not h.scheduler.books.running:
            for order in orders(h)[seen:]:
                store.fill(order, len(order.block_ids))
                report = LoadReport(len(order.block_ids), by_tier=(("host", len(order.block_ids)),))
                h.engine.handle(LoadFinished(order.load_id, report))
            seen = len(orders(h))
    assert at_once == 2
    assert not store.parked
    calm, _ = stored(num_blocks=64, block_size=8)
    calm.add("r", prompt, 40, n=4, temperature=1.0, seed=3)
    calm.run()
    for index in range(4):
        assert h.tokens("r", index) == calm.tokens("r", index)
        assert len(h.tokens("r", index)) == 40


def test_a_parked_sequence_that_is_aborted_is_unparked(stored) -> None:
    h, store = stored(num_blocks=12, block_size=8)
    h.add("a", random_prompt(30, 1), 40)
    h.add("b", random_prompt(30, 2), 40)
    while not store.parked:
        h.step()
    h.engine.handle(Abort("b"))
    assert not store.parked
    h.run()


@pytest.mark.parametrize("seed", range(3))
def test_random_storm_with_a_store_keeps_the_books(stored, seed: int) -> None:
    """Loads that bring all, some or nothing, preemption, n, aborts: every answer is right, every prompt
    token has one source, nothing stays parked."""
    h, store = stored(num_blocks=40, block_size=8, max_num_batched_tokens=24)
    rng, seen, open_loads = random.Random(seed), 0, []
    asked: dict[str, tuple[list[int], int]] = {}

    def turn(share: float) -> None:
        nonlocal seen
        h.step()
        open_loads.extend(e for e in h.events[seen:] if isinstance(e, LoadOrdered))
        seen = len(h.events)
        while open_loads and rng.random() < share:
            order = open_loads.pop(rng.randrange(len(open_loads)))
            count = rng.choice([0, len(order.block_ids) // 2, len(order.block_ids)])
            count = min(count, sum(block_hash in store.blocks for block_hash in order.hashes))
            store.fill(order, count)
            h.engine.handle(LoadFinished(order.load_id, LoadReport(count, by_tier=(("host", count),))))

    for i in range(300):
        prompt, limit = random_prompt(rng.randrange(1, 100), rng.randrange(12)), rng.randrange(1, 40)
        held = 0
        for block_hash in hash_blocks(b"namespace", prompt, 8)[: (len(prompt) - 1) // 8]:
            if block_hash not in store.blocks:
                break
            held += 1
        asked[f"r{i}"] = (prompt, limit)
        h.add(f"r{i}", prompt, limit, num_held=held, n=rng.choice([1, 1, 2]))
        for _ in range(rng.randrange(4)):
            turn(0.4)
        if rng.random() < 0.2:
            gone = f"r{rng.randrange(i + 1)}"
            h.engine.handle(Abort(gone))
            asked.pop(gone, None)
    while h.scheduler.books.waiting or h.scheduler.books.running or h.scheduler.books.loading:
        turn(1.0)
    assert h.scheduler.num_preempted
    assert not store.parked
    for name, (prompt, limit) in asked.items():
        assert h.tokens(name) == expected(prompt, limit), name
