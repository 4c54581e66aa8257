"""Paged execution against the hash model: every answer equals the one computed from tokens alone."""

from __future__ import annotations

import pytest
from hash_model import expected, random_prompt

from core.errors import ContextLengthExceeded, EngineFault, Overloaded
from core.request import PrefillTarget
from engine.messages import (
    AddPrefill,
)
from engine.sequence import PrefillJob

TARGET = PrefillTarget("p0", "127.0.0.1:1", "life")


@pytest.mark.parametrize("block_size", [8, 16, 32])
def test_block_borders_in_a_recycled_pool(harness, block_size: int) -> None:
    """Pain B3: decoding across borders attends no stale slot and leaks no tail block."""
    h = harness(num_blocks=160 // block_size, block_size=block_size, caching=False, max_num_seqs=1)
    for length in range(1, 51):
        h.add(f"r{length}", random_prompt(length, length), 40)
        h.run()
        assert h.tokens(f"r{length}") == expected(random_prompt(length, length), 40)


@pytest.mark.parametrize(("length", "cached"), [(15, 0), (16, 0), (17, 16), (32, 16), (33, 32)])
def test_whole_prompt_cached_leaves_a_token_to_compute(harness, length: int, cached: int) -> None:
    h = harness(block_size=16)
    prompt = random_prompt(length)
    for name in ("cold", "hit"):
        h.add(name, prompt)
        h.run()
        assert h.tokens(name) == expected(prompt, 8)
    assert h.gathered("cold").cached_tokens == 0
    assert h.gathered("hit").cached_tokens == cached


def test_answers_do_not_depend_on_company(harness) -> None:
    h = harness(num_blocks=256)
    prompts = {f"r{i}": random_prompt(3 + 5 * i, i) for i in range(20)}
    for name, prompt in prompts.items():
        h.add(name, prompt, 10)
    h.run()
    for name, prompt in prompts.items():
        assert h.tokens(name) == expected(prompt, 10)


def test_choices_share_the_prompt_and_copy_on_write(harness) -> None:
    h = harness(num_blocks=64, block_size=16)
    prompt = random_prompt(37)
    h.add("r", prompt, 20, n=4)
    h.run()
    assert h.finish("r") == ["length"] * 4
    assert {tuple(h.tokens("r", i)) for i in range(4)} == {tuple(expected(prompt, 20))}
    assert h.runner.tokens_computed == 37 + 4 * 19, "the prompt is computed once for all choices"


def test_seeded_choices_differ_and_repeat(harness) -> None:
    h = harness(num_blocks=64)
    for name in ("a", "b"):
        h.add(name, random_prompt(12), 16, n=3, temperature=2.5, seed=7)
        h.run()
    choices = [[h.tokens(name, i) for i in range(3)] for name in ("a", "b")]
    assert choices[0] == choices[1]
    assert len({tuple(c) for c in choices[0]}) > 1


def test_preempted_requests_continue_exactly(harness) -> None:
    """Two requests of 70% of the pool each, with sampling: the later one is preempted and finishes."""
    h = harness(num_blocks=20, block_size=8)
    for name, seed in (("a", 1), ("b", 2)):
        h.add(name, random_prompt(16, seed), 96, temperature=1.5, seed=seed)
    h.run()
    assert h.scheduler.num_preempted > 0
    crowded = {name: h.tokens(name) for name in ("a", "b")}
    calm = harness(num_blocks=64, block_size=8)
    for name, seed in (("a", 1), ("b", 2)):
        calm.add(name, random_prompt(16, seed), 96, temperature=1.5, seed=seed)
        calm.run()
        assert crowded[name] == calm.tokens(name)


def test_three_growing_outputs_all_finish(harness) -> None:
    h = harness(num_blocks=32, block_size=16, max_num_seqs=8)
    for i in range(3):
        h.add(f"r{i}", random_prompt(110, i), 200)
    h.run()
    for i in range(3):
        assert h.tokens(f"r{i}") == expected(random_prompt(110, i), 200)


def test_what_never_fits_is_refused_at_once(harness) -> None:
    h = harness(num_blocks=40, block_size=8)
    h.add("big", random_prompt(300), 100)
    failed = h.failure("big")
    assert failed is not None
    assert isinstance(failed.error, ContextLengthExceeded)
    assert "400" not in failed.error.message
    assert "320" in failed.error.message
    h.add("small", random_prompt(9))
    h.run()
    assert h.tokens("small") == expected(random_prompt(9), 8)


@pytest.mark.parametrize(("length", "max_tokens", "fits"), [(60, 4, True), (60, 5, False), (64, 1, False)])
def test_no_position_lies_beyond_the_models_context(
    harness, length: int, max_tokens: int, fits: bool
) -> None:
    h = harness(max_model_len=64)
    h.add("r", random_prompt(length), max_tokens)
    h.run()
    if fits:
        assert h.tokens("r") == expected(random_prompt(length), max_tokens)
        return
    error = h.failure("r").error
    assert isinstance(error, ContextLengthExceeded)
    for number in (f"({length} tokens)", f"({max_tokens})", "64 tokens"):
        assert number in error.message


def test_a_prefill_job_beyond_the_models_context_is_refused(harness) -> None:
    h = harness(block_size=8, max_model_len=64)
    h.engine.handle(AddPrefill(PrefillJob("job", tuple(random_prompt(72)))))
    assert isinstance(h.failure("job").error, ContextLengthExceeded)
    assert "72" in h.failure("job").error.message


def test_a_full_queue_says_busy(harness) -> None:
    h = harness(max_waiting=2)
    for i in range(4):
        h.add(f"r{i}", random_prompt(9, i))
    failures = [h.failure(f"r{i}") for i in range(4)]
    assert [bool(f) for f in failures] == [False, False, True, True]
    assert isinstance(failures[2].error, Overloaded)
    h.run()


def test_shorts_pass_a_long_prompt_and_the_long_one_finishes(harness) -> None:
    """Pain B7: neither side starves, whichever came first."""
    h = harness(num_blocks=2048, block_size=8, max_num_batched_tokens=256, max_num_seqs=64)
    h.add("long", random_prompt(6000), 4)
    waits = []
    for i in range(60):
        if i < 20:
            h.add(f"short{i}", random_prompt(40, i), 2)
            born = h.engine.steps
            while not h.tokens(f"short{i}"):
                h.step()
            waits.append(h.engine.steps - born)
        else:
            h.step()
    assert max(waits) <= 3
    h.run()
    assert h.tokens("long") == expected(random_prompt(6000), 4)


def test_long_prompt_finishes_under_constant_short_traffic(harness) -> None:
    h = harness(num_blocks=256, block_size=8, max_num_batched_tokens=32, max_num_seqs=8)
    h.add("long", random_prompt(800), 2)
    for i in range(400):
        h.add(f"s{i}", random_prompt(24, i), 2)
        h.step()
        if h.finish("long"):
            break
    assert h.finish("long") == ["length"]
    assert h.engine.steps < 120
    h.run()


def test_a_large_request_is_passed_over_only_so_often(harness) -> None:
    h = harness(num_blocks=32, block_size=8, max_num_seqs=16)
    for i in range(4):
        h.add(f"w{i}", random_prompt(20, i), 30)
    h.step()
    h.add("large", random_prompt(200, 99), 8)
    for i in range(300):
        h.add(f"s{i}", random_prompt(10, i), 6)
        h.step()
        if h.tokens("large"):
            break
    assert h.tokens("large"), "starved by short requests"
    h.run()


def test_max_tokens_one_and_stop_at_token_one(harness) -> None:
    """Pain C5: no step runs after the last token."""
    h = harness()
    prompt = random_prompt(12)
    (first,) = expected(prompt, 1)
    h.add("one", prompt, 1)
    h.run()
    assert (h.tokens("one"), h.finish("one")) == ([first], ["length"])
    steps = h.engine.steps
    h.add("stop", prompt, 50, stop_token_ids=frozenset({first}))
    h.run()
    assert (h.tokens("stop"), h.finish("stop")) == ([first], ["stop"])
    assert h.engine.steps - steps == 1


def test_min_tokens_masks_every_stop_id(harness) -> None:
    h = harness()
    prompt = random_prompt(12)
    stops = frozenset(expected(prompt, 5))
    h.add("r", prompt, 20, stop_token_ids=stops, min_tokens=6)
    h.run()
    assert not stops & set(h.tokens("r")[:6])


def test_salts_never_share(harness) -> None:
    h = harness()
    for name, salt in (("a", ""), ("b", "tenant"), ("c", "tenant")):
        h.add(name, random_prompt(40), 2, cache_salt=salt)
        h.run()
    assert [h.gathered(n).cached_tokens for n in ("a", "b", "c")] == [0, 0, 32]


def test_a_broken_hash_never_mixes_prompts(harness, monkeypatch) -> None:
    """Pain B2: with a constant hash the tokens compared on a hit keep answers right."""

    class Constant:
        def digest(self) -> bytes:
            return b"\0" * 32

    monkeypatch.setattr("core.blocks.blake3", lambda _: Constant())
    h = harness()
    for i in range(6):
        prompt = random_prompt(40, i % 3)
        h.add(f"r{i}", prompt, 6)
        h.run()
        assert h.tokens(f"r{i}") == expected(prompt, 6)
    repeated = [5] * 40
    h.add("same", repeated, 6)
    h.add("same2", repeated, 6)
    h.run()
    assert h.tokens("same") == h.tokens("same2") == expected(repeated, 6)


def test_a_failing_step_ends_its_requests_only(harness) -> None:
    """Pain A6: the engine lives on."""
    h = harness()
    h.runner.fail_at = 3
    h.add("bad", random_prompt(12), 10)
    for _ in range(4):
        h.step()
    failed = h.failure("bad")
    assert failed is not None
    assert isinstance(failed.error, EngineFault)
    assert len(h.tokens("bad")) == 2
    h.add("good", random_prompt(12), 10)
    h.run()
    assert h.tokens("good") == expected(random_prompt(12), 10)


def test_eight_choices_share_their_prompt_and_copy_what_they_write(harness) -> None:
    """n=8 on a pool that holds neither eight prompts nor all eight answers at once."""
    h = harness(num_blocks=40, block_size=8)
    prompt = random_prompt(61, 4)
    h.add("r", prompt, 40, n=8, temperature=1.0, seed=11)
    while not h.tokens("r", 7):
        h.step()
    assert h.pool.num_blocks - h.pool.num_free <= 8 + 8, "the prompt once, and a tail for each"
    h.run()
    assert h.scheduler.num_preempted
    calm = harness(num_blocks=200, block_size=8)
    calm.add("r", prompt, 40, n=8, temperature=1.0, seed=11)
    calm.run()
    for index in range(8):
        assert h.tokens("r", index) == calm.tokens("r", index)
        assert len(h.tokens("r", index)) == 40
