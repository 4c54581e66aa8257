"""How one step's token budget is shared among prompts: a pure function."""

from __future__ import annotations

from collections.abc import Sequence


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
