"""One token per row of logits: temperature, top-k, top-p, min-p, then a draw, without sorting.

Each filter keeps what is at or above a threshold. A threshold is found digit by digit in the bits of the
logits, made to order like unsigned integers: of 16 candidates the largest is taken above which there is still
enough (tokens for top-k, weight for top-p), eight times.

    float bits   1|magnitude  ->  all flipped         0|magnitude  ->  first bit set
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from engine.kernels.reference import NUM_SAMPLE_PARAMS

TILE = 1024


@triton.jit
def _read(row, at, mask, temperature, top):
    """Weights relative to the largest, 0 where not `mask`; and the order of the logits as uint32."""
    logit = tl.load(row + at, mask, other=float("-inf"))
    bits = logit.to(tl.uint32, bitcast=True)
    order = tl.where(bits >= 0x80000000, bits ^ 0xFFFFFFFF, bits | 0x80000000)
    return tl.exp((logit - top) / temperature), order


@triton.jit
def _threshold(row, vocab, temperature, top, least, target, COUNT: tl.constexpr, TILE: tl.constexpr):
    """The largest order at or above which there are `target` tokens (COUNT) or that much weight.

    Tokens of an order below `least` do not count.
    """
    digit = tl.arange(0, 16).to(tl.uint32)
    found = tl.full((), 0, tl.uint32)
    unit = tl.full((), 0x10000000, tl.uint32)
    for _ in range(8):
        candidates = found + digit * unit
        above = tl.zeros((16,), tl.float32)
        for start in range(0, vocab, TILE):
            at = start + tl.arange(0, TILE)
            weight, order = _read(row, at, at < vocab, temperature, top)
            if COUNT:
                weight = tl.where(at < vocab, 1.0, 0.0)
            weight = tl.where(order >= least, weight, 0.0)
            above += tl.sum(tl.where(order[:, None] >= candidates[None, :], weight[:, None], 0.0), 0)
        best = tl.maximum(tl.sum((above >= target).to(tl.int32), 0) - 1, 0)
        found += best.to(tl.uint32) * unit
        unit = unit >> 4
    return found


@triton.jit
def _kept_weight(row, vocab, temperature, top, least, min_p, TILE: tl.constexpr):
    """Sum of the weights that are left."""
    total = 0.0
    for start in range(0, vocab, TILE):
        at = start + tl.arange(0, TILE)
        weight, order = _read(row, at, at < vocab, temperature, top)
        total += tl.sum(tl.where((order >= least) & (weight >= min_p), weight, 0.0), 0)
    return total


@triton.jit(do_not_specialize=["vocab", "row_stride"])
def sample_kernel(logits, params, chosen, vocab, row_stride, NUM_PARAMS: tl.constexpr, TILE: tl.constexpr):
    """One row."""
    nth = tl.program_id(0).to(tl.int64)
    row, of_row = logits + nth * row_stride, params + nth * NUM_PARAMS
    temperature, top_k, top_p = tl.load(of_row), tl.load(of_row + 1), tl.load(of_row + 2)
    min_p, uniform = tl.load(of_row + 3), tl.load(of_row + 4)

    best = tl.full((TILE,), float("-inf"), tl.float32)
    for start in range(0, vocab, TILE):
        at = start + tl.arange(0, TILE)
        best = tl.maximum(best, tl.load(row + at, at < vocab, other=float("-inf")))
    top = tl.max(best, 0)
    first = vocab
    last = 0
    if temperature == 0.0:
        for start in range(0, vocab, TILE):
            at = start + tl.arange(0, TILE)
            is_top = tl.load(row + at, at < vocab, other=float("-inf")) == top
            first = tl.minimum(first, tl.min(tl.where(is_top & (at < vocab), at, vocab), 0))
    else:
        least = tl.full((), 0, tl.uint32)
        if top_k > 0.0:
            least = _threshold(row, vocab, temperature, top, least, top_k, True, TILE)
        if top_p < 1.0:
            target = top_p * _kept_weight(row, vocab, temperature, top, least, 0.0, TILE)
            by_p = _threshold(row, vocab, temperature, top, least, target, False, TILE)
            least = tl.maximum(least, by_p)
        target = uniform * _kept_weight(row, vocab, temperature, top, least, min_p, TILE)
        passed = 0.0
        for start in range(0, vocab, TILE):
            at = start + tl.arange(0, TILE)
            weight, order = _read(row, at, at < vocab, temperature, top)
            kept = (order >= least) & (weight >= min_p) & (weight > 0.0)
            weight = tl.where(kept, weight, 0.0)
            hit = kept & (passed + tl.cumsum(weight, 0) > target)
            first = tl.minimum(first, tl.min(tl.where(hit, at, vocab), 0))
            last = tl.maximum(last, tl.max(tl.where(kept, at, 0), 0))
            passed += tl.sum(weight, 0)
    # The sums of the walk may end a little below those of the total.
    tl.store(chosen + nth, tl.where(first == vocab, last, first))


def sample(logits: torch.Tensor, params: torch.Tensor) -> torch.Tensor:
    """Token ids int32 [n] from fp32 logits [n, vocab] and fp32 params [n, 5]; see `reference.sample`."""
    if logits.stride(1) != 1 or not params.is_contiguous():
        raise ValueError(f"sample needs contiguous rows, got strides {logits.stride()} and {params.stride()}")
    num_rows, vocab = logits.shape
    chosen = torch.empty(num_rows, dtype=torch.int32, device=logits.device)
    sample_kernel[(num_rows,)](
        logits,
        params,
        chosen,
        vocab,
        logits.stride(0),
        NUM_PARAMS=NUM_SAMPLE_PARAMS,
        TILE=TILE,
        num_warps=8,
    )
    return chosen
