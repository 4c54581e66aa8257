import random

import pytest

from planning.sources import LocalPrice, PrefillPrice, Prompt, Rest, TierPrice, decide

# The embedded model on one core: 2,048 tokens, 127 full blocks of 720 KiB, 512 tokens/s.
PROMPT = Prompt(num_tokens=2048, num_blocks=127, block_size=16, block_nbytes=720 * 1024)
LOCAL = LocalPrice(tokens_per_s=512)
PREFILL = PrefillPrice(tokens_per_s=512, link_nbytes_per_s=3e9)


def tier(source: str, count: int, nbytes_per_s: float, latency_s: float = 0.001) -> TierPrice:
    return TierPrice(source, count, latency_s, PROMPT.block_nbytes / nbytes_per_s)


HOST = tier("host", 127, 8e9, 0.0005)
DISK = tier("disk", 127, 1e9)


@pytest.mark.parametrize(
    ("tiers", "prefill", "label", "loaded", "seconds"),
    [
        # nothing is held anywhere
        ([], None, "local", 0, 4.0),
        # held: loaded, and only the last 16 tokens are computed
        ([HOST], None, "host+local", 127, 0.0005 + 127 * 737280 / 8e9 + 16 / 512),
        ([DISK], None, "disk+local", 127, 0.001 + 127 * 737280 / 1e9 + 16 / 512),
        # two tiers hold one part each
        ([tier("host", 27, 8e9), tier("redis", 100, 9e8)], None, "host+redis+local", 127, None),
        # the second one is too slow to be worth it
        ([tier("host", 27, 8e9), tier("disk", 100, 1e7)], None, "host+local", 27, None),
        # an idle worker like ourselves: the same time and a link on top, so it is computed here
        ([], PREFILL, "local", 0, 4.0),
        # a worker twice as fast
        ([], PrefillPrice(1024, 3e9), "prefill", 0, 127 * 16 / 1024 + 737280 / 3e9 + 16 / 512),
        # the same with a queue
        ([], PrefillPrice(1024, 3e9, queue_s=3.0), "local", 0, 4.0),
        # our own queue is longer, but we need our turn anyway for the rest of the prompt
        ([], PrefillPrice(1024, 3e9, queue_s=0.5), "prefill", 0, None),
        # it holds most of the prompt: only the link counts
        ([], PrefillPrice(512, 3e9, cached_blocks=127), "prefill", 0, 128 * 737280 / 3e9 + 16 / 512),
        # and the link is slow
        ([], PrefillPrice(512, 2e7, cached_blocks=127), "local", 0, 4.0),
        # host for the head, the worker for the tail, which it computes from what it holds
        (
            [tier("host", 60, 8e9)],
            PrefillPrice(4096, 2e8, cached_blocks=60),
            "host+prefill",
            60,
            None,
        ),
        # everything is in host RAM, so nobody is asked
        ([HOST], PrefillPrice(1e6, 3e9), "host+local", 127, None),
    ],
)
def test_cheapest_combination(tiers, prefill, label, loaded, seconds):
    decision = decide(PROMPT, tiers, LOCAL, prefill)
    assert (decision.chosen.label, decision.chosen.num_loaded) == (label, loaded)
    if seconds is not None:
        assert decision.chosen.seconds == pytest.approx(seconds)


@pytest.mark.parametrize("fraction", [1, 10, 100])
def test_a_throttled_tier_is_used_only_while_it_beats_computing(fraction):
    """4 s to compute, 94 MB to load: at 200 MB/s worth it, at a tenth of that 4.7 s, so not."""
    decision = decide(PROMPT, [tier("disk", 127, 2e8 / fraction)], LOCAL)
    assert decision.chosen.label == ("disk+local" if fraction == 1 else "local")
    assert decision.chosen.seconds <= 4.0


@pytest.mark.parametrize(("gain", "label"), [(0.0, "local"), (0.05, "local"), (0.1, "disk+local")])
def test_a_tie_prefers_local(gain, label):
    block_s = 16 / 512 * (1 - gain)
    prompt = Prompt(num_tokens=1600, num_blocks=100, block_size=16, block_nbytes=1)
    decision = decide(prompt, [TierPrice("disk", 100, 0.0, block_s)], LOCAL)
    assert decision.chosen.label == label


def test_even_one_block_that_costs_nothing_is_taken():
    decision = decide(PROMPT, [tier("host", 1, 8e9)], LOCAL)
    assert decision.chosen.loads == (("host", 1),)


@pytest.mark.parametrize(("harm", "label"), [(0.0, "local"), (0.2, "prefill")])
def test_running_decodes_make_an_equal_worker_the_better_one(harm, label):
    decision = decide(PROMPT, [], LocalPrice(tokens_per_s=512, harm=harm), PREFILL)
    assert decision.chosen.label == label
    local = next(c for c in decision.candidates if c.label == "local")
    assert (local.seconds, local.cost_s) == (4.0, 4.0 * (1 + harm))


def test_the_own_pools_blocks_cost_nothing():
    prompt = Prompt(2048, 127, 16, 720 * 1024, first_block=100)
    decision = decide(prompt, [DISK], LOCAL)
    assert decision.chosen.loads == (("disk", 27),)
    assert decision.chosen.seconds == pytest.approx(0.001 + 27 * 737280 / 1e9 + 16 / 512)


def test_every_candidate_is_reported_cheapest_first():
    tiers = [tier("host", 20, 8e9), tier("disk", 30, 1e9)]
    decision = decide(PROMPT, tiers, LOCAL, PrefillPrice(700, 3e9))
    assert {c.label for c in decision.candidates} == {
        "local",
        "host+local",
        "host+disk+local",
        "prefill",
        "host+prefill",
        "host+disk+prefill",
    }
    costs = [c.cost_s for c in decision.candidates]
    assert costs == sorted(costs)
    assert decision.chosen in decision.candidates


def test_a_prompt_without_full_blocks_is_computed_here():
    decision = decide(Prompt(16, 0, 16, 1000), [HOST], LOCAL, PREFILL)
    assert [c.label for c in decision.candidates] == ["local"]


def test_never_worse_than_computing_and_never_more_than_is_missing():
    rng = random.Random(4)
    for _ in range(500):
        first = rng.randrange(64)
        prompt = Prompt(2048, 127, 16, 720 * 1024, first_block=first)
        tiers = [tier(n, rng.randrange(1, 150), 10 ** rng.uniform(6, 10)) for n in ("host", "disk", "redis")]
        prefill = PrefillPrice(10 ** rng.uniform(2, 4), 10 ** rng.uniform(7, 10), rng.random())
        decision = decide(prompt, tiers, LocalPrice(10 ** rng.uniform(2, 4)), prefill)
        chosen = decision.chosen
        baseline = next(c for c in decision.candidates if c.label == Rest.LOCAL)
        assert chosen.seconds <= baseline.seconds
        assert chosen.num_loaded <= 127 - first
