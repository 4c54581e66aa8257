"""Which tokens may come next: what a grammar, `allowed_token_ids`, `min_tokens` and `bad_words` leave.

They apply in this order, and one that would leave nothing to draw is passed over in that step. So a
grammar always holds, and where it can only end it ends below `min_tokens` too.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from collections.abc import Sequence as Seq

import torch

from core.request import SamplingParams
from engine.sequence import Sequence


def any_apply(seq: Sequence) -> bool:
    """Whether anything could be kept from being drawn now."""
    params, constrained = seq.sampling, seq.matcher is not None
    constrained |= bool(params.allowed_token_ids or params.bad_words)
    return constrained or seq.num_output < params.min_tokens


def allowed(seq: Sequence, vocab_size: int) -> torch.Tensor:
    """bool `[vocab_size]`: tokens that may be drawn next, at least one."""
    matcher = seq.caught_up_matcher()
    left = torch.ones(vocab_size, dtype=torch.bool) if matcher is None else matcher.allowed()
    for mask in _masks(seq, seq.sampling, vocab_size):
        both = left & mask
        if both.any():
            left = both
    return left


def _masks(seq: Sequence, params: SamplingParams, vocab_size: int) -> Iterator[torch.Tensor]:
    if params.allowed_token_ids:
        yield _only(params.allowed_token_ids, vocab_size)
    if seq.num_output < params.min_tokens and params.stop_token_ids:
        yield ~_only(params.stop_token_ids, vocab_size)
    if params.bad_words:
        yield ~_only(completing(params.bad_words, seq.tokens[seq.num_prompt :]), vocab_size)


def _only(token_ids: Iterable[int], vocab_size: int) -> torch.Tensor:
    mask = torch.zeros(vocab_size, dtype=torch.bool)
    mask[list(token_ids)] = True
    return mask


def completing(words: Seq[tuple[int, ...]], output: list[int]) -> set[int]:
    """The tokens that would complete one of `words` after `output`."""
    return {word[-1] for word in words if _ends_with(output, word[:-1])}


def _ends_with(output: list[int], begun: tuple[int, ...]) -> bool:
    return not begun or tuple(output[-len(begun) :]) == begun
