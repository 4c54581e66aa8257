"""Attention of a tile of query rows over a range of one sequence's blocks: the loop both attentions share.

Online softmax in base 2 (Milakov and Gimelshein 2018; Dao et al. 2022). All query heads of a KV head are rows
of the same tile, so K and V are loaded once for the group.

    first                                  full_to                        end
      |        every row sees all tokens      |   causal edge: masked      |

A sliding window has a second edge, so there every tile is masked: a third loop would spill registers. Only
tokens in [first, end) are read: what older blocks or later slots hold, NaN included, cannot reach a result.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from engine.kernels.triton.kv_format import UNITS, load_kv
from engine.kernels.triton.tuning import Tile, dot_dtype, padded

LOG2_E = 1.4426950408889634


def base2_scale(head_dim: int, k_scale: float, kv_format: str) -> float:
    """From q . k as loaded to the exponent of 2 in softmax."""
    return LOG2_E * head_dim**-0.5 * k_scale * UNITS[kv_format]


def attention_constexprs(
    group: int,
    rows: int,
    tile: Tile,
    layer_pool: torch.Tensor,
    kv_format: str,
    dtype: torch.dtype,
    window: int,
) -> dict[str, object]:
    """What an attention kernel is compiled for."""
    *_, block_size, head_dim = layer_pool.shape
    return {
        "GROUP": group,
        "ROWS": rows,
        "TOKENS": tile.tokens,
        "BLOCK_SIZE": block_size,
        "HEAD_DIM": head_dim,
        "DIM_PAD": padded(head_dim),
        "WINDOWED": window > 0,
        "FORMAT": kv_format,
        "DOT": dot_dtype(dtype),
    }


@triton.jit
def attend(
    q,
    positions,
    pool,
    table,
    block_stride,
    first,
    full_to,
    end,
    window,
    qk_scale,
    ROWS: tl.constexpr,
    TOKENS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIM_PAD: tl.constexpr,
    WINDOWED: tl.constexpr,
    FORMAT: tl.constexpr,
):
    """(weighted values [ROWS, DIM_PAD], largest score, sum of weights [ROWS]) in fp32, not normalised.

    q [ROWS, DIM_PAD]; row i, at position positions[i], sees tokens (positions[i] - window, positions[i]].
    `pool` points at K of one layer's KV head in block 0. `full_to`, and `first` unless WINDOWED, are
    multiples of TOKENS, where tiles start. `qk_scale` includes log2(e).
    """
    acc = tl.zeros((ROWS, DIM_PAD), tl.float32)
    top = tl.full((ROWS,), float("-inf"), tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    if not WINDOWED:
        acc, top, total = _walk(
            acc, top, total, q, positions, pool, table, block_stride, first, full_to, first, end, window,
            qk_scale, False, TOKENS, BLOCK_SIZE, HEAD_DIM, DIM_PAD, WINDOWED, FORMAT,
        )  # fmt: skip
        start = full_to
    else:
        start = first // TOKENS * TOKENS
    return _walk(
        acc, top, total, q, positions, pool, table, block_stride, start, end, first, end, window,
        qk_scale, True, TOKENS, BLOCK_SIZE, HEAD_DIM, DIM_PAD, WINDOWED, FORMAT,
    )  # fmt: skip


@triton.jit
def _walk(
    acc,
    top,
    total,
    q,
    positions,
    pool,
    table,
    block_stride,
    start,
    stop,
    first,
    end,
    window,
    qk_scale,
    MASKED: tl.constexpr,
    TOKENS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIM_PAD: tl.constexpr,
    WINDOWED: tl.constexpr,
    FORMAT: tl.constexpr,
):
    """Tiles of tokens from `start` up to `stop`."""
    lane = tl.arange(0, DIM_PAD)
    for tile in range(start, stop, TOKENS):
        token = tile + tl.arange(0, TOKENS)
        if MASKED:
            readable = (token >= first) & (token < end)
            block = tl.load(table + token // BLOCK_SIZE, readable, other=0)
            mask = readable[:, None] & (lane < HEAD_DIM)[None, :]
        else:
            block = tl.load(table + token // BLOCK_SIZE)
            mask = None if HEAD_DIM == DIM_PAD else (lane < HEAD_DIM)[None, :]
        row = block.to(tl.int64) * block_stride + (token % BLOCK_SIZE) * HEAD_DIM
        k_at = pool + row[:, None] + lane[None, :]
        k = load_kv(k_at, mask, FORMAT, q.dtype)
        scores = tl.dot(q, tl.trans(k), input_precision="ieee") * qk_scale
        if MASKED:
            visible = readable[None, :] & (token[None, :] <= positions[:, None])
            if WINDOWED:
                visible = visible & (token[None, :] > positions[:, None] - window)
            scores = tl.where(visible, scores, float("-inf"))
        new_top = tl.maximum(top, tl.max(scores, 1))
        # A row that has seen nothing yet has no largest score; 0 keeps inf - inf away.
        reference = tl.where(new_top == float("-inf"), 0.0, new_top) if MASKED else new_top
        weights = tl.exp2(scores - reference[:, None])
        fade = tl.exp2(top - reference)
        total = total * fade + tl.sum(weights, 1)
        v = load_kv(k_at + BLOCK_SIZE * HEAD_DIM, mask, FORMAT, q.dtype)
        acc = tl.dot(weights.to(q.dtype), v, acc * fade[:, None], input_precision="ieee")
        top = new_top
    return acc, top, total
