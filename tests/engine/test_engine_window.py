"""Models with a sliding window: blocks go back as they fall out of it, and no answer changes."""

from __future__ import annotations

import random

import pytest
from hash_model import VOCAB, Harness, expected, random_prompt

from core.request import PrefillTarget
from engine.messages import Abort, AddPrefill, BlocksBuilt, LoadFinished, LoadOrdered, LoadReport, Quiet
from engine.sequence import PrefillJob

TARGET = PrefillTarget("p0", "127.0.0.1:1", "life")


def most_blocks(window: int, block_size: int) -> int:
    """What a decoding sequence holds at most: the window's other tokens, however they lie, and the next one."""
    return -(-(window - 1) // block_size) + 1


def check_held(h: Harness, window: int) -> None:
    """Bounds what decoding sequences hold, and wipes what nobody does: attending to it then fails at once."""
    size = h.runner.size
    if not h.pool.caching:
        for block_id in range(h.pool.num_blocks):
            if h.pool.refs(block_id) == 0:
                h.runner.slots[block_id * size : (block_id + 1) * size] = [None] * size
    for seq in h.scheduler.books.running:
        if seq.is_prefill_job:
            assert seq.num_dropped == 0
        elif seq.decoding:
            assert len(seq.live_blocks) <= most_blocks(window, size)


@pytest.mark.parametrize("block_size", [8, 16])
@pytest.mark.parametrize("window", [1, 2, 8, 9, 15, 16, 17, 24, 40])
def test_a_long_answer_holds_only_its_window(harness, window: int, block_size: int) -> None:
    h = harness(num_blocks=256 // block_size, block_size=block_size, caching=False, sliding_window=window)
    prompt = random_prompt(50, window)
    h.add("r", prompt, 150)
    while h.step():
        check_held(h, window)
    assert h.tokens("r") == expected(prompt, 150, sliding_window=window)


def test_a_prompt_gives_back_what_its_next_chunks_do_not_see(harness) -> None:
    h = harness(block_size=8, max_num_batched_tokens=16, sliding_window=20)
    h.add("r", random_prompt(64), 4)
    dropped = []
    while h.step():
        dropped += [seq.num_dropped for seq in h.scheduler.books.running]
    assert dropped[:4] == [0, 1, 3, 5], "after 16, 32, 48, 64 tokens: (tokens + 1 - 20) // 8"
    assert h.tokens("r") == expected(random_prompt(64), 4, sliding_window=20)


def test_more_sequences_fit_than_without_a_window(harness) -> None:
    """Eight answers of 120 tokens are 128 blocks; 40 are enough when each keeps 3."""
    preempted = {}
    for window in (0, 16):
        h = harness(num_blocks=40, block_size=8, sliding_window=window)
        for i in range(8):
            h.add(f"r{i}", random_prompt(10, i), 118)
        h.run()
        for i in range(8):
            assert h.tokens(f"r{i}") == expected(random_prompt(10, i), 118, sliding_window=window)
        preempted[window] = h.scheduler.num_preempted
    assert preempted[0] > 0
    assert preempted[16] == 0


def test_fallen_blocks_of_a_prompt_are_still_found_by_the_next_one(harness) -> None:
    h = harness(block_size=8, sliding_window=12)
    for name in ("cold", "hit"):
        h.add(name, random_prompt(60), 10)
        h.run()
        assert h.tokens(name) == expected(random_prompt(60), 10, sliding_window=12)
    assert h.gathered("hit").cached_tokens == 56


def test_choices_share_the_window_and_drop_it_each_for_itself(harness) -> None:
    h = harness(num_blocks=64, block_size=8, sliding_window=20)
    prompt = random_prompt(61)
    h.add("r", prompt, 40, n=4)
    while h.step():
        check_held(h, 20)
    assert {tuple(h.tokens("r", i)) for i in range(4)} == {tuple(expected(prompt, 40, sliding_window=20))}


def test_a_prefill_job_keeps_every_block_for_its_peer(harness) -> None:
    h = harness(block_size=8, max_num_batched_tokens=16, sliding_window=8)
    h.engine.handle(AddPrefill(PrefillJob("job", tuple(random_prompt(64)))))
    while h.step():
        pass
    built = [block for e in h.events if isinstance(e, BlocksBuilt) for block in e.block_ids]
    assert len(set(built)) == 8
    assert h.pool.num_free == 64 - 8
    h.engine.handle(Abort("job"))


@pytest.mark.parametrize("caching", [True, False])
@pytest.mark.parametrize("window", [1, 9, 33, 60])
def test_random_storm_of_a_windowed_model(harness, window: int, caching: bool) -> None:
    """Abort, stop, n, preempt, jobs, loads on a small pool: greedy answers are exact, the books balance."""
    rng = random.Random(window)
    h = harness(num_blocks=28, block_size=8, sliding_window=window, caching=caching)
    greedy: dict[str, tuple[list[int], int, frozenset[int]]] = {}
    jobs: list[str] = []
    seen = 0

    def settle(chance: float) -> None:
        nonlocal seen
        for order in [e for e in h.events[seen:] if isinstance(e, LoadOrdered)]:
            unquiet = order.block_ids[-2:] if rng.random() < 0.2 else ()
            h.engine.handle(LoadFinished(order.load_id, LoadReport(0, unquiet=unquiet)))
            h.engine.handle(Quiet(unquiet))
        seen = len(h.events)
        while jobs and rng.random() < chance:
            h.engine.handle(Abort(jobs.pop()))

    for i in range(200):
        prompt = random_prompt(rng.randrange(1, 120), rng.randrange(20))
        if rng.random() < 0.15:
            jobs.append(f"j{i}")
            h.engine.handle(
                AddPrefill(PrefillJob(jobs[-1], tuple(prompt[: len(prompt) // 8 * 8] or prompt * 8)))
            )
        else:
            stops, count = frozenset({rng.randrange(VOCAB)}), rng.randrange(1, 80)
            temperature = rng.choice([0.0, 0.0, 1.0])
            if temperature == 0.0:
                greedy[f"r{i}"] = (prompt, count, stops)
            h.add(
                f"r{i}",
                prompt,
                count,
                n=rng.choice([1, 1, 1, 2, 3]),
                temperature=temperature,
                stop_token_ids=stops,
                prefill=TARGET if rng.random() < 0.3 else None,
            )
        for _ in range(rng.randrange(6)):
            h.step()
            check_held(h, window)
        settle(0.4)
        if rng.random() < 0.1:
            h.engine.handle(Abort(f"r{rng.randrange(i + 1)}", rng.choice([None, 0, 1])))
    for _ in range(20_000):
        settle(1.0)
        if not h.step() and not h.scheduler.books.waiting and not h.scheduler.books.loading:
            break
    exact = 0
    for name, (prompt, count, stops) in greedy.items():
        want = expected(prompt, count, stops, window)
        for index in range(3):
            got = h.tokens(name, index)
            assert got == want[: len(got)]
            exact += got == want
    assert exact > 100
    assert (h.scheduler.num_preempted > 0) == (window >= 33), "a small window leaves room for everybody"
