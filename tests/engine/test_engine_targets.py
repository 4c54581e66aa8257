"""Chunk budgets that let running decodes keep their target; what is queued, as routers are told."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
from hash_model import Harness, expected, random_prompt

from core.request import PrefillTarget
from core.step_model import StepModel
from engine.batch import Batch
from engine.budget import MIN_PROMPT_TOKENS, budget_within
from engine.messages import AddPrefill, BlocksArrived, LoadFinished, LoadOrdered, LoadReport
from engine.sequence import PrefillJob

MODEL = StepModel(a=0.01, b=0.001, c=1e-6)
TARGET = PrefillTarget("p0", "127.0.0.1:1", "life")
MakeHarness = Callable[..., Harness]


@pytest.mark.parametrize(
    ("step_s", "starts", "remaining", "most", "budget"),
    [
        pytest.param(1.0, [0], [1000], 256, 256, id="all-fit"),
        pytest.param(0.0605, [0], [1000], 256, 49, id="as-many-as-fit"),  # 10 + 49 + 1.2 ms
        pytest.param(0.0605, [1000], [1000], 256, 25, id="fewer-behind-a-long-context"),  # 10 + 25 + 25.3 ms
        pytest.param(0.0605, [1000, 0], [1000, 20], 256, 33, id="the-shares-count"),  # 17 behind 1000, 16
        pytest.param(0.0605, [0], [30], 256, 256, id="a-short-rest-fits-whole"),
        pytest.param(0.02, [0], [1000], 256, MIN_PROMPT_TOKENS, id="prompts-always-go-on"),
        pytest.param(-1.0, [0], [1000], 256, MIN_PROMPT_TOKENS, id="decodes-alone-miss-it"),
        pytest.param(-1.0, [0], [1000], 9, 9, id="never-above-the-limit"),
        pytest.param(0.0605, [], [], 256, 256, id="no-prompts"),
    ],
)
def test_the_largest_budget_within_a_step(
    step_s: float, starts: list[int], remaining: list[int], most: int, budget: int
) -> None:
    assert budget_within(step_s, MODEL, starts, remaining, most) == budget


def on_a_machine(harness: Harness) -> list[tuple[float, int]]:
    """Let steps take 5 ms, 1 ms a decode and 1 ms a prompt token; seconds and tokens of each step."""
    steps: list[tuple[float, int]] = []

    def run(inner: Callable[[Batch], torch.Tensor], batch: Batch) -> torch.Tensor:
        took = 0.005 + 0.001 * batch.num_tokens
        harness.clock.advance(took)
        steps.append((took, batch.num_tokens))
        return inner(batch)

    harness.runner.run = partial(run, harness.runner.run)  # type: ignore[method-assign]
    return steps


def with_known_times(harness: MakeHarness) -> tuple[Harness, list[tuple[float, int]]]:
    """A machine whose steps the engine has learnt."""
    made = harness(num_blocks=400, max_num_batched_tokens=256)
    steps = on_a_machine(made)
    for i, length in enumerate((30, 100, 200, 50, 250, 10)):
        made.add(f"w{i}", random_prompt(length, seed=i), max_tokens=12)
        made.run()
    return made, steps


def test_decodes_keep_their_target_while_a_long_prompt_comes_in(harness: MakeHarness) -> None:
    """1. Two streams decode, one with a target of 60 ms. 2. A prompt of 1500 tokens comes: alone it would fill
    steps of 261 ms. 3. No step takes longer than the target, and each is used as far as it allows. 4. Once the
    stream with the target is over, steps are full again."""
    h, steps = with_known_times(harness)
    h.add("a", random_prompt(20, seed=10), max_tokens=20, itl_slo_s=0.06)
    h.add("b", random_prompt(20, seed=11), max_tokens=60)
    h.step()
    del steps[:]
    h.add("long", random_prompt(1500, seed=12), max_tokens=2)
    while not h.finish("a"):
        h.step()
    assert len(steps) == 19
    assert max(took for took, _ in steps) <= 0.06
    assert min(took for took, _ in steps) > 0.045
    del steps[:]
    h.run()
    assert steps[0][1] == 256
    assert h.tokens("long") == expected(random_prompt(1500, seed=12), 2)


def test_the_strictest_target_counts_and_prompts_come_to_their_end(harness: MakeHarness) -> None:
    """Targets of 60 ms and of 1 ms, which no step can keep: 16 prompt tokens in each."""
    h, steps = with_known_times(harness)
    h.add("a", random_prompt(20, seed=10), max_tokens=80, itl_slo_s=0.06)
    h.add("b", random_prompt(20, seed=11), max_tokens=80, itl_slo_s=0.001)
    h.step()
    del steps[:]
    h.add("long", random_prompt(800, seed=12), max_tokens=1)
    while not h.finish("long"):
        h.step()
    assert [tokens for _, tokens in steps] == [2 + MIN_PROMPT_TOKENS] * 50
    h.run()


def test_without_decodes_or_targets_steps_are_full(harness: MakeHarness) -> None:
    h, steps = with_known_times(harness)
    del steps[:]
    h.add("alone", random_prompt(600, seed=10), max_tokens=1, itl_slo_s=0.001)
    h.run()
    assert [tokens for _, tokens in steps] == [256, 256, 88]


def test_a_failed_step_teaches_nothing(harness: MakeHarness) -> None:
    h, steps = with_known_times(harness)
    before = h.engine.stats()
    h.runner.fail_at = h.runner.steps + 1
    h.add("a", random_prompt(20, seed=10))
    h.run()
    assert steps
    assert h.failure("a")
    after = h.engine.stats()
    assert (after.prefill_model, after.decode_model) == (before.prefill_model, before.decode_model)


def test_what_is_queued_counts_what_is_to_be_computed(harness: MakeHarness) -> None:
    """Blocks of 8 tokens, two sequences at once, 32 tokens a step.

    1. A prompt of 40 and another one of which a tier holds 3 blocks are queued, a job of 24 and a request
    that a prefill worker is asked for. 2. A step computes 32 tokens of the first one; the second one's load is
    ordered. 3. The load brings a block of three, the rest is computed: both decode. 4. Nothing is queued.
    """
    h = harness(max_num_seqs=2)
    h.add("a", random_prompt(40, seed=1), max_tokens=3)
    h.add("held", random_prompt(30, seed=2), num_held=3, max_tokens=3)
    h.engine.handle(AddPrefill(PrefillJob("job", tuple(random_prompt(24, seed=3)))))
    h.add("remote", random_prompt(50, seed=4), prefill=TARGET, max_tokens=3)
    assert h.engine.stats().queued_tokens == 40 + (30 - 24) + 24 + (50 - 48)
    h.step()
    assert h.engine.stats().queued_tokens == 8 + 6 + 24 + 2
    order = next(e for e in h.events if isinstance(e, LoadOrdered))
    for position, token in enumerate(random_prompt(30, seed=2)[:8]):
        h.runner.slots[order.block_ids[0] * 8 + position] = (token, position)
    h.engine.handle(BlocksArrived(order.load_id, 1))
    assert h.engine.stats().queued_tokens == 8 + 6 + 24 + 2
    h.engine.handle(LoadFinished(order.load_id, LoadReport(1, (("host", 1),))))
    assert h.engine.stats().queued_tokens == 8 + 22 + 24 + 2
    h.step()
    assert h.engine.stats().context_tokens == 41 + 31
    h.scheduler.abort("remote")
    h.run()
    h.scheduler.abort("job")
    stats = h.engine.stats()
    assert (stats.queued_tokens, stats.context_tokens) == (0, 0)


def test_the_preempted_are_queued_with_all_their_tokens(harness: MakeHarness) -> None:
    """Two streams in a pool that cannot hold both: the younger one goes back with what it has generated."""
    h = harness(num_blocks=6, caching=False)
    h.add("a", random_prompt(16, seed=1), max_tokens=20)
    h.add("b", random_prompt(16, seed=2), max_tokens=20)
    while not h.engine.stats().preemptions:
        assert h.engine.stats().queued_tokens in (0, 16, 32)
        h.step()
    (victim,) = h.scheduler.books.waiting
    assert h.engine.stats().queued_tokens == len(victim.tokens) > 16
    h.run()
    assert h.tokens("b") == expected(random_prompt(16, seed=2), 20)
