"""Sampling rules as tables, and the independence of each draw from its company."""

from __future__ import annotations

import pytest
import torch

from core.blocks import BlockHasher
from core.request import Request, SamplingParams
from engine.masks import completing
from engine.sampler import Draw, logprobs_of, sample, uniform
from engine.sequence import Sequence

VOCAB = 5000


def _draw_of(
    row: int, output: tuple[int, ...] = (), prompt: tuple[int, ...] = (1, 2, 3), index: int = 0, **given
) -> Draw:
    params = SamplingParams(**({"max_tokens": 99, "seed": 5} | given))
    tokens = [*prompt, *output]
    seq = Sequence("s", tokens, len(prompt), BlockHasher(b"", "", 8), 0, 0.0, Request("r", prompt, params))
    return Draw(row, seq, index)


def _draw(logits: torch.Tensor, output: tuple[int, ...] = (), **given):
    return sample(logits[None], [_draw_of(0, output, **given)])[0]


@pytest.fixture
def logits() -> torch.Tensor:
    return torch.randn(VOCAB, generator=torch.Generator().manual_seed(3)) * 3


def test_greedy_takes_the_best(logits) -> None:
    assert _draw(logits, temperature=0.0)[0] == int(logits.argmax())


@pytest.mark.parametrize(("temperature", "greedy"), [(0.0, True), (1e-38, True), (9e-6, True), (1e-5, False)])
def test_tiny_temperatures_take_the_best_too(logits, temperature: float, greedy: bool) -> None:
    """Logits over 1e-38 are infinite in fp32; at 1e-5 and above they are not."""
    assert SamplingParams(max_tokens=1, seed=0, temperature=temperature).greedy is greedy
    assert _draw(logits, temperature=temperature)[0] == int(logits.argmax())
    assert _draw(logits, temperature=temperature, top_p=0.9)[0] == int(logits.argmax())


def test_a_draw_depends_on_seed_choice_and_position_alone(logits) -> None:
    given = {"temperature": 1.3}
    assert _draw(logits, (7, 8), **given) == _draw(logits, (9, 9), **given)
    spread = {_draw(logits, tuple(range(n)), **given)[0] for n in range(40)}
    assert len(spread) > 10
    assert _draw(logits, index=3, seed=5, **given) == _draw(logits, index=0, seed=8, **given)
    assert uniform(2**64 - 1, 0) != uniform(0, 0)


@pytest.mark.parametrize(
    "filters",
    [
        {"top_k": 5},
        {"top_p": 0.4},
        {"min_p": 0.2},
        {"top_k": 50, "top_p": 0.5},
        {"top_p": 0.999},
        {"min_p": 1e-6},
    ],
)
def test_filters_keep_what_a_plain_implementation_keeps(logits, filters) -> None:
    probs = torch.softmax(logits / 0.9, -1)
    order = torch.argsort(probs, descending=True)
    kept = order[: filters.get("top_k", VOCAB)]
    share = probs[kept] / probs[kept].sum()
    kept = kept[(share.cumsum(0) - share) < filters.get("top_p", 1.0)]
    kept = kept[probs[kept] >= filters.get("min_p", 0.0) * probs.max()]
    seen = {_draw(logits, tuple(range(n)), temperature=0.9, **filters)[0] for n in range(300)}
    assert seen <= set(kept.tolist())
    if len(kept) < 10:
        assert seen == set(kept.tolist())


def test_frequencies_follow_the_probabilities() -> None:
    logits = torch.log(torch.tensor([0.5, 0.3, 0.2]))
    counts = [0, 0, 0]
    for n in range(3000):
        counts[_draw(logits, tuple([0] * n), prompt=(1,))[0]] += 1
    assert counts[0] == pytest.approx(1500, abs=120)
    assert counts[2] == pytest.approx(600, abs=100)


def test_repetition_counts_prompt_and_output_once(logits) -> None:
    flat = torch.ones(10)
    flat[4], flat[5] = 1.25, 1.2
    assert _draw(flat, prompt=(1,), temperature=0.0, repetition_penalty=1.3)[0] == 4
    assert _draw(flat, prompt=(4,), temperature=0.0, repetition_penalty=1.3)[0] == 5
    assert _draw(flat, (5, 5), prompt=(4,), temperature=0.0, repetition_penalty=1.3)[0] == 0


def test_presence_and_frequency_count_the_output_only() -> None:
    flat = torch.zeros(10)
    flat[4], flat[5] = 1.0, 0.5
    for penalty in ("presence_penalty", "frequency_penalty"):
        assert _draw(flat, prompt=(4, 4), temperature=0.0, **{penalty: 0.7})[0] == 4
        assert _draw(flat, (4,), prompt=(4,), temperature=0.0, **{penalty: 0.7})[0] == 5
    assert _draw(flat, (4, 5, 5), prompt=(1,), temperature=0.0, frequency_penalty=0.4)[0] == 4


def test_penalties_rebuilt_from_tokens_equal_those_kept(logits) -> None:
    given = {"temperature": 0.0, "repetition_penalty": 1.3, "frequency_penalty": 0.3}
    params = SamplingParams(max_tokens=99, seed=0, **given)
    seq = Sequence("s", [1, 2], 2, BlockHasher(b"", "", 8), 0, 0.0, Request("r", (1, 2), params))
    for _ in range(12):
        ((token, _),) = sample(logits[None], [Draw(0, seq, 0)])
        assert token == _draw(logits, tuple(seq.tokens[2:]), prompt=(1, 2), **given)[0]
        seq.append(token)


def test_bias_and_min_tokens(logits) -> None:
    best = int(logits.argmax())
    assert _draw(logits, temperature=0.0, logit_bias=((17, 100.0),))[0] == 17
    stop = {"stop_token_ids": frozenset({best}), "temperature": 0.0}
    assert _draw(logits, min_tokens=1, **stop)[0] != best
    assert _draw(logits, (3,), min_tokens=1, **stop)[0] == best


def test_only_allowed_token_ids_are_drawn(logits) -> None:
    worst = [int(i) for i in logits.argsort()[:3]]
    given = {"allowed_token_ids": tuple(worst)}
    assert _draw(logits, temperature=0.0, **given)[0] == worst[-1]
    assert {_draw(logits, tuple(range(n)), temperature=2.0, **given)[0] for n in range(40)} == set(worst)


@pytest.mark.parametrize(
    ("output", "masked"),
    [
        ((), {7}),
        ((1,), {7}),
        ((3,), {7, 4}),
        ((3, 4), {7, 5}),
        ((9, 3, 4), {7, 5}),
        ((4, 3), {7, 4}),
        ((3, 4, 5), {7}),
        ((8,), {7, 8}),
    ],
)
def test_the_token_that_would_complete_a_bad_word_is_masked(output: tuple[int, ...], masked: set[int]):
    words = ((7,), (3, 4), (3, 4, 5), (8, 8))
    assert completing(words, list(output)) == masked
    flat = torch.zeros(12)
    drawn = {
        _draw(flat, output, prompt=(3, 4), temperature=1.0, bad_words=words, seed=s)[0] for s in range(300)
    }
    assert drawn == set(range(12)) - masked, "the prompt's tokens do not count"


@pytest.mark.parametrize(
    ("given", "best"),
    [
        ({"allowed_token_ids": (2,), "bad_words": ((2,),)}, 2),
        ({"allowed_token_ids": (2,), "stop_token_ids": frozenset({2}), "min_tokens": 5}, 2),
        ({"allowed_token_ids": (2, 3), "stop_token_ids": frozenset({2}), "min_tokens": 5}, 3),
        ({"stop_token_ids": frozenset({0}), "min_tokens": 5, "bad_words": ((1,),)}, 2),
    ],
)
def test_a_mask_that_would_leave_nothing_is_passed_over(given: dict[str, object], best: int) -> None:
    assert _draw(torch.tensor([4.0, 3.0, 2.0, 1.0]), temperature=0.0, **given)[0] == best


def test_masks_change_neither_the_draws_number_nor_the_raw_logprobs(logits) -> None:
    """Where all that is masked is improbable, the same (seed, position) draws the same token."""
    sharp = logits * 4
    kept = tuple(int(i) for i in sharp.argsort(descending=True)[:2000])
    for n in range(20):
        free = _draw(sharp, tuple(range(n)), temperature=1.0, top_k=1000, logprobs=1)
        assert free == _draw(
            sharp, tuple(range(n)), temperature=1.0, top_k=1000, logprobs=1, allowed_token_ids=kept
        )


def test_logprobs_are_of_the_raw_distribution(logits) -> None:
    token, logprob = _draw(logits, temperature=0.0, logprobs=3, logit_bias=((17, 100.0),))
    raw = torch.log_softmax(logits, -1)
    assert logprob is not None
    assert logprob.logprob == pytest.approx(float(raw[token]), abs=1e-5)
    assert [t for t, _ in logprob.top] == raw.topk(3).indices.tolist()
    assert _draw(logits, logprobs=0)[1].top == ()


@pytest.mark.parametrize("counts", [[0] * 40, [3] * 40, [0, 1, 20, 3, 5] * 8])
def test_logprobs_of_many_rows_are_bit_for_bit_those_of_each_alone(counts: list[int]) -> None:
    rows = torch.randn(40, VOCAB, generator=torch.Generator().manual_seed(3)) * 3
    rows[::2] = rows[::2].round()  # ties
    token_ids = [7 * i for i in range(40)]
    got = logprobs_of(rows, token_ids, counts)
    for row, token_id, count, logprob in zip(rows, token_ids, counts, got, strict=True):
        alone = torch.log_softmax(row, -1)
        best, ids = torch.topk(alone, count)
        assert (logprob.token_id, logprob.logprob) == (token_id, float(alone[token_id]))
        assert logprob.top == tuple(zip(ids.tolist(), best.tolist(), strict=True))
    assert logprobs_of(rows[:0], [], []) == []


def test_each_draw_of_a_step_gets_the_logprobs_it_asks_for(logits) -> None:
    rows = torch.stack([logits, logits.flip(0)])
    draws = [_draw_of(row, temperature=0.0, logprobs=count) for row, count in ((1, 2), (0, None), (0, 0))]
    (_, first), (_, none), (_, last) = sample(rows, draws)
    assert none is None
    assert first == logprobs_of(rows[1:], [int(rows[1].argmax())], [2])[0]
    assert last == logprobs_of(rows[:1], [int(rows[0].argmax())], [0])[0]
