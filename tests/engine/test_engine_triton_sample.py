"""The Triton sampler, interpreted, against its torch twin; and the twin against the rules in words."""

from __future__ import annotations

import interpreted_triton  # noqa: F401  (before every import of the kernels)
import pytest
import torch
from hypothesis import given, settings
from triton_sample import SampleCase, check_sample, sample_cases

from engine.kernels import reference
from engine.kernels.triton.sample import sample

# Numpy warns where hardware silently goes to infinity, in lanes that a mask drops.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")


@settings(max_examples=200, deadline=None)
@given(sample_cases)
def test_sample(case: SampleCase) -> None:
    check_sample(case)


LOGITS = torch.log(torch.tensor([[0.1, 0.4, 0.2, 0.3]]))


@pytest.mark.parametrize(
    ("params", "chosen"),
    [
        ((0.0, 0, 1.0, 0.0, 0.99), 1),
        ((1.0, 0, 1.0, 0.0, 0.0), 0),
        ((1.0, 0, 1.0, 0.0, 0.11), 1),
        ((1.0, 0, 1.0, 0.0, 1.0), 3),
        ((1.0, 1, 1.0, 0.0, 0.99), 1),
        ((1.0, 2, 1.0, 0.0, 0.0), 1),
        ((1.0, 2, 1.0, 0.0, 0.6), 3),
        ((1.0, 0, 0.5, 0.0, 0.58), 3),
        ((1.0, 0, 0.3, 0.0, 0.99), 1),
        ((1.0, 0, 1.0, 0.6, 0.0), 1),
        ((1.0, 3, 0.5, 0.0, 0.99), 3),
        ((0.01, 0, 1.0, 0.0, 0.99), 1),
    ],
)
def test_rules_on_four_tokens(params: tuple[float, ...], chosen: int) -> None:
    given_params = torch.tensor([params])
    assert reference.sample(LOGITS, given_params).tolist() == [chosen]
    assert sample(LOGITS, given_params).tolist() == [chosen]


def test_ties_with_the_last_kept_token_are_kept() -> None:
    logits = torch.tensor([[1.0, 2.0, 1.0, 0.0]]).expand(30, -1)
    params = torch.tensor([[1.0, 2, 1.0, 0.0, i / 30] for i in range(30)])
    for draw in (sample, reference.sample):
        assert set(draw(logits, params).tolist()) == {0, 1, 2}


def test_equal_largest_logits_give_the_first() -> None:
    logits = torch.zeros(1, 3000)
    logits[0, [1500, 2900]] = 1.0
    assert sample(logits, torch.tensor([[0.0, 0, 1.0, 0.0, 0.5]])).tolist() == [1500]


def test_rows_that_are_not_contiguous_are_refused() -> None:
    with pytest.raises(ValueError, match="contiguous rows"):
        sample(torch.zeros(4, 4).T, torch.zeros(4, 5))
