"""Prefill jobs, loads from a source, and everything at once, against the hash model."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from hash_model import VOCAB, expected, random_prompt

from core.request import PrefillTarget
from engine.messages import (
    Abort,
    AddPrefill,
    BlocksArrived,
    BlocksBuilt,
    LoadCancelled,
    LoadFinished,
    LoadOrdered,
    LoadReport,
    Quiet,
)
from engine.sequence import PrefillJob

TARGET = PrefillTarget("p0", "127.0.0.1:1", "life")


def test_prefill_job_publishes_as_it_commits_and_is_held(harness) -> None:
    h = harness(block_size=8, max_num_batched_tokens=16)
    h.engine.handle(AddPrefill(PrefillJob("job", tuple(random_prompt(48)))))
    while h.step():
        pass
    built = [e for e in h.events if isinstance(e, BlocksBuilt)]
    assert [(e.first, len(e.block_ids)) for e in built] == [(0, 2), (2, 2), (4, 2)]
    assert list(h.scheduler.books.held) == ["job"]
    assert h.pool.num_free == 64 - 6
    h.engine.handle(Abort("job"))
    h.engine.handle(Abort("job"))
    h.engine.handle(AddPrefill(PrefillJob("again", tuple(random_prompt(48)))))
    h.step()
    built = [e for e in h.events if isinstance(e, BlocksBuilt)][3:]
    assert [(len(e.block_ids), e.cached) for e in built] == [(6, True)], "nothing is sampled"
    h.engine.handle(Abort("again"))


def _deliver(source, target, order: LoadOrdered, prompt: list[int], count: int) -> None:
    """Copy blocks from another engine's pool as a transfer would, and report them."""
    h, p = target, source
    until = (order.first_block + len(order.block_ids)) * h.runner.size
    p.engine.handle(AddPrefill(PrefillJob("job", tuple(prompt[:until]))))
    while p.step():
        pass
    blocks = [b for e in p.events if isinstance(e, BlocksBuilt) for b in e.block_ids]
    size = h.runner.size
    for src, dst in list(zip(blocks[order.first_block :], order.block_ids, strict=True))[:count]:
        for offset in range(size):
            h.runner.slots[dst * size + offset] = p.runner.slots[src * size + offset]
    h.engine.handle(BlocksArrived(order.load_id, count))
    p.engine.handle(Abort("job"))


@pytest.mark.parametrize("arrived", [0, 1, 3, 4])
def test_what_a_source_does_not_deliver_is_computed(harness, arrived: int) -> None:
    p, h = harness(block_size=8), harness(block_size=8)
    prompt = random_prompt(37)
    h.add("r", prompt, 6, prefill=TARGET)
    h.step()
    (order,) = [e for e in h.events if isinstance(e, LoadOrdered)]
    assert (order.first_block, len(order.block_ids)) == (0, 4)
    assert not h.step(), "nothing is computed while blocks arrive"
    _deliver(p, h, order, prompt, arrived)
    h.engine.handle(LoadFinished("r/0", LoadReport(arrived=arrived)))
    h.run()
    assert h.tokens("r") == expected(prompt, 6)
    gathered = h.gathered("r")
    assert (gathered.remote_tokens, gathered.computed_tokens) == (8 * arrived, 37 - 8 * arrived)
    assert h.runner.tokens_computed == 37 - 8 * arrived + 5


def test_own_pool_comes_first_and_short_rests_are_computed_here(harness) -> None:
    h = harness(block_size=8)
    target = replace(TARGET, min_tokens=16)
    prompt = random_prompt(60)
    h.add("first", prompt[:33], 2)
    h.run()
    h.add("more", prompt, 2, prefill=target)
    h.step()
    (order,) = [e for e in h.events if isinstance(e, LoadOrdered)]
    assert (order.first_block, len(order.block_ids)) == (4, 3)
    h.engine.handle(LoadFinished("more/0", LoadReport(arrived=0)))
    h.run()
    h.add("short", prompt[:20] + [1] * 12, 2, prefill=target)
    h.run()
    assert sum(isinstance(e, LoadOrdered) for e in h.events) == 1


def test_aborting_a_load_keeps_its_blocks_until_it_is_over(harness) -> None:
    h = harness(block_size=8)
    h.add("r", random_prompt(37), 6, prefill=TARGET)
    h.step()
    h.engine.handle(Abort("r"))
    h.step()
    assert any(isinstance(e, LoadCancelled) for e in h.events)
    assert h.pool.num_free == 64 - 5, "a read may still be writing"
    h.engine.handle(BlocksArrived("r/0", 2))
    h.engine.handle(LoadFinished("r/0", LoadReport(arrived=2)))
    assert h.pool.num_free == 64
    h.engine.handle(LoadFinished("r/0", LoadReport(arrived=2)))


@pytest.mark.parametrize("tight", [False, True])
def test_unquiet_blocks_are_quarantined_and_replaced(harness, tight: bool) -> None:
    """A timed-out read may write later: nobody may own its target blocks until then."""
    h = harness(num_blocks=6 if tight else 64, block_size=8)
    prompt = random_prompt(37)
    h.add("r", prompt, 6, prefill=TARGET)
    h.step()
    (order,) = [e for e in h.events if isinstance(e, LoadOrdered)]
    h.engine.handle(LoadFinished("r/0", LoadReport(arrived=0, unquiet=order.block_ids)))
    assert h.pool.num_quarantined == 4
    for _ in range(20):
        h.step()
    assert h.tokens("r") == ([] if tight else expected(prompt, 6))
    for block_id in order.block_ids:
        for offset in range(8):
            h.runner.slots[block_id * 8 + offset] = (13, 999)  # the late write
    h.engine.handle(Quiet(order.block_ids))
    h.run()
    assert h.tokens("r") == expected(prompt, 6)


def test_a_prompt_that_starts_over_counts_its_sources_anew(harness) -> None:
    """A load whose blocks could not be replaced: what it brought is found in the own pool, or computed."""
    p, h = harness(block_size=8), harness(num_blocks=6, block_size=8)
    prompt = random_prompt(37)
    h.add("r", prompt, 6, prefill=TARGET)
    h.step()
    (order,) = [e for e in h.events if isinstance(e, LoadOrdered)]
    _deliver(p, h, order, prompt, 2)
    unquiet = order.block_ids[2:]
    h.engine.handle(LoadFinished("r/0", LoadReport(arrived=2, unquiet=unquiet)))
    h.engine.handle(Quiet(unquiet))
    h.run()
    assert h.tokens("r") == expected(prompt, 6)
    gathered = h.gathered("r")
    assert (gathered.cached_tokens, gathered.remote_tokens, gathered.computed_tokens) == (16, 0, 21)


def test_a_prompt_preempted_before_its_first_token_counts_its_sources_anew(harness) -> None:
    """1. b starts with 24 cached tokens. 2. The choices of a grow and preempt it in mid-prompt.
    3. Taken up again, it finds what it had computed, as far as a did not need those blocks."""
    h = harness(num_blocks=28, block_size=8, max_num_batched_tokens=8)
    prompt = random_prompt(150, 1)
    h.add("warm", prompt[:24], 1)
    h.run()
    h.add("a", random_prompt(15, 2), 30, n=4)
    while not h.tokens("a"):
        h.step()
    h.add("b", prompt, 2)
    while not h.scheduler.num_preempted and not h.tokens("b"):
        h.step()
    assert not h.tokens("b")
    h.run()
    assert h.tokens("b") == expected(prompt, 2)
    gathered = h.gathered("b")
    assert (gathered.cached_tokens, gathered.computed_tokens) == (56, 94)


@pytest.mark.parametrize("seed", range(4))
def test_random_storm_keeps_the_books(harness, seed: int) -> None:
    """Pain B4: 500 short random requests on 64 blocks: abort, stop, n, preempt, jobs, loads."""
    h, rng, open_loads, jobs = harness(num_blocks=64, block_size=8), random.Random(seed), [], []
    answered, seen = 0, 0
    for i in range(500):
        name, prompt = f"r{i}", random_prompt(rng.randrange(1, 120), rng.randrange(30))
        kind = rng.random()
        if kind < 0.15:
            job = f"j{i}"
            h.engine.handle(AddPrefill(PrefillJob(job, tuple(prompt[: len(prompt) // 8 * 8] or prompt * 8))))
            jobs.append(job)
        else:
            h.add(
                name,
                prompt,
                rng.randrange(1, 60),
                n=rng.choice([1, 1, 1, 2, 3]),
                temperature=rng.choice([0.0, 1.0]),
                stop_token_ids=frozenset({rng.randrange(VOCAB)}),
                prefill=TARGET if rng.random() < 0.4 else None,
            )
        for _ in range(rng.randrange(4)):
            h.step()
        open_loads += [e for e in h.events[seen:] if isinstance(e, LoadOrdered)]
        seen = len(h.events)
        while open_loads and rng.random() < 0.5:
            order = open_loads.pop(rng.randrange(len(open_loads)))
            unquiet = order.block_ids[-2:] if rng.random() < 0.2 else ()
            h.engine.handle(LoadFinished(order.load_id, LoadReport(0, unquiet=unquiet)))
            h.engine.handle(Quiet(unquiet))
        if rng.random() < 0.3:
            h.engine.handle(Abort(f"r{rng.randrange(i + 1)}", rng.choice([None, 0, 1])))
        while jobs and rng.random() < 0.4:
            h.engine.handle(Abort(jobs.pop(rng.randrange(len(jobs)))))
    for _ in range(20_000):
        open_loads += [e for e in h.events[seen:] if isinstance(e, LoadOrdered)]
        seen = len(h.events)
        for order in open_loads:
            h.engine.handle(LoadFinished(order.load_id, LoadReport(0)))
        open_loads.clear()
        for job in jobs:
            h.engine.handle(Abort(job))
        jobs.clear()
        if not h.step() and not h.scheduler.books.waiting and not h.scheduler.books.loading:
            break
    answered = sum(len(h.finish(f"r{i}")) for i in range(500))
    assert answered > 300
