"""How one step's token budget is shared among prompts: pure functions."""

from __future__ import annotations

from collections.abc import Sequence

from core.step_model import StepModel

MIN_PROMPT_TOKENS = 16
"""Of a step that has prompts, whatever is decoded beside them: they would never come to an end."""


def share_budget(remaining: Sequence[int], budget: int) -> list[int]:
    """Tokens of each prompt to compute in this step.

    `remaining` holds the uncomputed tokens of the prompts in order of arrival. The oldest prompt is
    sure of half of the budget, so that no stream of short prompts can starve it; the other half
    goes to the shortest first, which keeps short prompts from waiting behind a long one and makes
    the mean time to first token least. What one side leaves, the other takes.
    """
    share = [0] * len(remaining)
    if not remaining or budget <= 0:
        return share
    share[0] = min(remaining[0], -(-budget // 2))
    left = budget - share[0]
    for i in sorted(range(1, len(remaining)), key=lambda i: (remaining[i], i)):
        share[i] = min(remaining[i], left)
        left -= share[i]
    share[0] += min(remaining[0] - share[0], left)
    return share


def cap_rows(remaining: Sequence[int], every_row: Sequence[bool], num_rows: int) -> list[int]:
    """`remaining`, but for prompts of which every row of logits is wanted no more than `num_rows` together;
    the first of them take first.
    """
    capped: list[int] = []
    for count, is_capped in zip(remaining, every_row, strict=True):
        taken = min(count, num_rows) if is_capped else count
        num_rows -= taken if is_capped else 0
        capped.append(taken)
    return capped


def budget_within(
    step_s: float, model: StepModel, starts: Sequence[int], remaining: Sequence[int], most: int
) -> int:
    """The largest budget up to `most` with which a step takes `step_s` seconds or less, as `model` has it;
    MIN_PROMPT_TOKENS where that is too much already.

    `starts`: tokens of each prompt that are computed; `remaining`: see `share_budget`, whose shares count.
    """

    def seconds(budget: int) -> float:
        shares = share_budget(remaining, budget)
        products = sum(n * (start + n / 2) for start, n in zip(starts, shares, strict=True))
        return model.seconds(sum(shares), products)

    if seconds(most) <= step_s:
        return most
    least, too_many = min(MIN_PROMPT_TOKENS, most), most
    while too_many - least > 1:
        middle = (least + too_many) // 2
        if seconds(middle) <= step_s:
            least = middle
        else:
            too_many = middle
    return least
