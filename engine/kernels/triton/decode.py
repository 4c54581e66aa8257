"""Attention of one new token per sequence, split over the context, then reduced (Flash-Decoding).

A split is a fixed range of positions, so a sequence's sums are grouped the same way whatever else is in the
batch: its result is the same bit for bit alone and in company, up to MAX_SPLITS * SPLIT_TOKENS tokens.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from engine.kernels.triton.kv_format import UNITS, stored
from engine.kernels.triton.paged import attend, attention_constexprs, base2_scale
from engine.kernels.triton.tuning import decode_rows, decode_tile, interpreted, padded

SPLIT_TOKENS = 512
MAX_SPLITS = 64
"""Bounds the workspace: for longer contexts the splits grow instead of their number."""

SPLITS_AT_ONCE = 16


# Values that change from step to step: specialised, each new kind would compile while a request waits.
@triton.jit(do_not_specialize=["table_stride", "split_tokens"])
def decode_kernel(
    qkv,
    pool,
    out,
    partial,
    scores,
    kv_lens,
    block_tables,
    row_stride,
    block_stride,
    table_stride,
    num_q_heads,
    window,
    qk_scale,
    v_scale,
    split_tokens,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    TOKENS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIM_PAD: tl.constexpr,
    WINDOWED: tl.constexpr,
    FORMAT: tl.constexpr,
    DOT: tl.constexpr,
    SPLIT: tl.constexpr,
):
    """One split of one sequence for one KV head; with SPLIT off there is one, and it writes the result."""
    seq, kv_head, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    kv_len = tl.load(kv_lens + seq)
    member, lane = tl.arange(0, ROWS), tl.arange(0, DIM_PAD)
    mask = (member < GROUP)[:, None] & (lane < HEAD_DIM)[None, :]
    head = kv_head * GROUP + member
    q_at = qkv + seq.to(tl.int64) * row_stride + head[:, None] * HEAD_DIM + lane[None, :]
    q = tl.load(q_at, mask, other=0.0).to(DOT)

    first = split * split_tokens
    end = tl.minimum(kv_len, first + split_tokens)
    if WINDOWED:
        first = tl.maximum(first, kv_len - window)
    full_to = tl.maximum(first, end // TOKENS * TOKENS)
    acc, top, total = attend(
        q, tl.zeros((ROWS,), tl.int32) + (kv_len - 1), pool + kv_head * 2 * BLOCK_SIZE * HEAD_DIM,
        block_tables + seq * table_stride, block_stride, first, full_to, end, window, qk_scale,
        ROWS, TOKENS, BLOCK_SIZE, HEAD_DIM, DIM_PAD, WINDOWED, FORMAT,
    )  # fmt: skip
    row = seq.to(tl.int64) * num_q_heads + head
    if SPLIT:
        at = row * tl.num_programs(2) + split
        written = first < end
        tl.store(partial + at[:, None] * HEAD_DIM + lane[None, :], acc, mask & written)
        tl.store(scores + at * 2, top, (member < GROUP) & written)
        tl.store(scores + at * 2 + 1, total, (member < GROUP) & written)
    else:
        result = acc * (v_scale / tl.where(total == 0.0, 1.0, total))[:, None]
        tl.store(out + row[:, None] * HEAD_DIM + lane[None, :], result.to(out.dtype.element_ty), mask)


@triton.jit(do_not_specialize=["num_splits", "split_tokens"])
def reduce_kernel(
    partial,
    scores,
    out,
    kv_lens,
    num_splits,
    window,
    v_scale,
    split_tokens,
    HEAD_DIM: tl.constexpr,
    DIM_PAD: tl.constexpr,
    WINDOWED: tl.constexpr,
    AT_ONCE: tl.constexpr,
):
    """Join the splits of one row and head: weights relative to the largest score of all."""
    seq, head = tl.program_id(0), tl.program_id(1)
    row = seq.to(tl.int64) * tl.num_programs(1) + head
    kv_len = tl.load(kv_lens + seq)
    first_split = 0
    if WINDOWED:
        first_split = tl.maximum(0, kv_len - window) // split_tokens
    last_split = tl.cdiv(kv_len, split_tokens)
    lane = tl.arange(0, DIM_PAD)
    acc = tl.zeros((DIM_PAD,), tl.float32)
    top, total = float("-inf"), 0.0
    for start in range(first_split // AT_ONCE * AT_ONCE, last_split, AT_ONCE):
        split = start + tl.arange(0, AT_ONCE)
        used = (split >= first_split) & (split < last_split)
        at = row * num_splits + split
        tops = tl.load(scores + at * 2, used, other=float("-inf"))
        new_top = tl.maximum(top, tl.max(tops, 0))
        weights = tl.exp2(tops - new_top)
        fade = tl.exp2(top - new_top)
        total = total * fade + tl.sum(tl.load(scores + at * 2 + 1, used, other=0.0) * weights, 0)
        values_at = partial + at[:, None] * HEAD_DIM + lane[None, :]
        values = tl.load(values_at, used[:, None] & (lane < HEAD_DIM)[None, :], other=0.0)
        acc = acc * fade + tl.sum(values * weights[:, None], 0)
        top = new_top
    result = acc * (v_scale / tl.where(total == 0.0, 1.0, total))
    tl.store(out + row * HEAD_DIM + lane, result.to(out.dtype.element_ty), lane < HEAD_DIM)


def split_tokens_for(max_kv_len: int) -> int:
    """Tokens of a split: a constant up to MAX_SPLITS splits, then doubled until that many suffice."""
    smallest = 32 if interpreted() else SPLIT_TOKENS
    return smallest * max(1, triton.next_power_of_2(triton.cdiv(max_kv_len, smallest * MAX_SPLITS)))


def decode_attention(
    qkv: torch.Tensor,
    layer_pool: torch.Tensor,
    out: torch.Tensor,
    num_decodes: int,
    kv_lens: torch.Tensor,
    block_tables: torch.Tensor,
    window: int = 0,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
) -> None:
    """Fill the first `num_decodes` rows of `out` [T, heads * head_dim]; sequence i owns row i.

    Tensors as in `prefill_attention`. A sequence with a kv_len of 0 (padding of a captured graph) gets zeros.
    """
    pool, kv_format = stored(layer_pool)
    _, num_kv_heads, _, block_size, head_dim = pool.shape
    num_q_heads = out.shape[1] // head_dim
    group = num_q_heads // num_kv_heads
    tile = decode_tile(head_dim, qkv.dtype, pool.dtype)
    max_kv_len = block_tables.shape[1] * block_size
    split_tokens = split_tokens_for(max_kv_len)
    num_splits = triton.cdiv(max_kv_len, split_tokens)
    is_split = num_splits > 1
    partial = scores = out
    if is_split:
        partial = qkv.new_empty((num_decodes, num_q_heads, num_splits, head_dim), dtype=torch.float32)
        scores = qkv.new_empty((num_decodes, num_q_heads, num_splits, 2), dtype=torch.float32)
    v_scale = v_scale * UNITS[kv_format]
    decode_kernel[(num_decodes, num_kv_heads, num_splits)](
        qkv,
        pool,
        out,
        partial,
        scores,
        kv_lens,
        block_tables,
        qkv.stride(0),
        pool.stride(0),
        block_tables.stride(0),
        num_q_heads,
        window,
        base2_scale(head_dim, k_scale, kv_format),
        v_scale,
        split_tokens,
        SPLIT=is_split,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
        **attention_constexprs(group, decode_rows(group), tile, pool, kv_format, qkv.dtype, window),
    )
    if is_split:
        reduce_kernel[(num_decodes, num_q_heads)](
            partial,
            scores,
            out,
            kv_lens,
            num_splits,
            window,
            v_scale,
            split_tokens,
            HEAD_DIM=head_dim,
            DIM_PAD=padded(head_dim),
            WINDOWED=window > 0,
            AT_ONCE=SPLITS_AT_ONCE,
        )
