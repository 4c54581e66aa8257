"""Causal attention of chunks of new tokens over their paged history.

    rows of one KV head     token 0: its g query heads | token 1: its g query heads | ...

A tile is a run of these rows, cut without regard to tokens, so any g fills it and K and V are loaded once for
all heads of the group.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from engine.kernels.triton.kv_format import UNITS, stored
from engine.kernels.triton.paged import attend, attention_constexprs, base2_scale
from engine.kernels.triton.tuning import prefill_tile


# Values that change from step to step: specialised, each new kind would compile while a request waits.
@triton.jit(do_not_specialize=["first_seq", "table_stride"])
def prefill_kernel(
    qkv,
    pool,
    out,
    q_starts,
    kv_lens,
    block_tables,
    first_seq,
    row_stride,
    block_stride,
    table_stride,
    num_q_heads,
    window,
    qk_scale,
    v_scale,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    TOKENS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIM_PAD: tl.constexpr,
    WINDOWED: tl.constexpr,
    FORMAT: tl.constexpr,
    DOT: tl.constexpr,
):
    """One tile of one sequence's rows for one KV head."""
    # The last tiles have the longest loops; they start first.
    first_row = (tl.num_programs(0) - 1 - tl.program_id(0)) * ROWS
    kv_head, seq = tl.program_id(1), first_seq + tl.program_id(2)
    q_start = tl.load(q_starts + seq)
    q_len = tl.load(q_starts + seq + 1) - q_start
    if first_row >= q_len * GROUP:
        return
    kv_len = tl.load(kv_lens + seq)

    flat = first_row + tl.arange(0, ROWS)
    lane = tl.arange(0, DIM_PAD)
    token = tl.minimum(flat // GROUP, q_len - 1)
    mask = (flat < q_len * GROUP)[:, None] & (lane < HEAD_DIM)[None, :]
    row = (q_start + token).to(tl.int64)
    head = kv_head * GROUP + flat % GROUP
    q = tl.load(qkv + (row * row_stride + head * HEAD_DIM)[:, None] + lane[None, :], mask, other=0.0)

    past = kv_len - q_len
    earliest = past + first_row // GROUP
    latest = past + tl.minimum((first_row + ROWS - 1) // GROUP, q_len - 1)
    first = 0
    if WINDOWED:
        first = tl.maximum(0, earliest - window + 1)
    full_to = (earliest + 1) // TOKENS * TOKENS
    acc, _, total = attend(
        q.to(DOT), past + token, pool + kv_head * 2 * BLOCK_SIZE * HEAD_DIM,
        block_tables + seq * table_stride, block_stride, first, full_to, latest + 1, window, qk_scale,
        ROWS, TOKENS, BLOCK_SIZE, HEAD_DIM, DIM_PAD, WINDOWED, FORMAT,
    )  # fmt: skip
    result = acc * (v_scale / total)[:, None]
    to = out + ((row * num_q_heads + head) * HEAD_DIM)[:, None] + lane[None, :]
    tl.store(to, result.to(out.dtype.element_ty), mask)


def prefill_attention(
    qkv: torch.Tensor,
    layer_pool: torch.Tensor,
    out: torch.Tensor,
    q_starts: torch.Tensor,
    first_seq: int,
    max_q_len: int,
    kv_lens: torch.Tensor,
    block_tables: torch.Tensor,
    window: int = 0,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
) -> None:
    """Fill the rows of `out` [T, heads * head_dim] that belong to sequences `first_seq` and on.

    qkv [T, (heads + 2 * kv heads) * head_dim], q already rotated; layer_pool [num_blocks, kv heads, 2,
    block_size, head_dim], a block contiguous, with K and V of all new tokens written; q_starts int32 [S + 1],
    kv_lens int32 [S] and block_tables int32 [S, widest] as in `Batch`; max_q_len: new tokens of the longest
    of these chunks. A number in the pool counts k_scale or v_scale times (for fp8).
    `window` > 0: a token sees itself and the window - 1 tokens before it; older blocks are not read.
    """
    pool, kv_format = stored(layer_pool)
    _, num_kv_heads, _, _, head_dim = pool.shape
    num_q_heads = out.shape[1] // head_dim
    group = num_q_heads // num_kv_heads
    tile = prefill_tile(head_dim, qkv.dtype, pool.dtype)
    num_tiles = triton.cdiv(max_q_len * group, tile.rows)
    prefill_kernel[(num_tiles, num_kv_heads, kv_lens.shape[0] - first_seq)](
        qkv,
        pool,
        out,
        q_starts,
        kv_lens,
        block_tables,
        first_seq,
        qkv.stride(0),
        pool.stride(0),
        block_tables.stride(0),
        num_q_heads,
        window,
        base2_scale(head_dim, k_scale, kv_format),
        v_scale * UNITS[kv_format],
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
        **attention_constexprs(group, tile.rows, tile, pool, kv_format, qkv.dtype, window),
    )
