"""Rotary embedding and the write of K and V into their blocks, one kernel over the fused projection."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from engine.kernels.triton.kv_format import store_kv, stored
from engine.kernels.triton.tuning import padded

HEADS_PER_PROGRAM = 8


@triton.jit
def rope_and_store_kernel(
    qkv,
    rope,
    positions,
    slots,
    pool,
    block_stride,
    num_q_heads,
    k_scale,
    v_scale,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HALF_PAD: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HEADS: tl.constexpr,
    FORMAT: tl.constexpr,
):
    """HEADS heads of one row of qkv; `pool` points at one layer. A negative slot stores nothing."""
    HALF: tl.constexpr = HEAD_DIM // 2
    row = tl.program_id(0).to(tl.int64)
    num_heads = num_q_heads + 2 * NUM_KV_HEADS
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    lane = tl.arange(0, HALF_PAD)
    mask = (head < num_heads)[:, None] & (lane < HALF)[None, :]

    at = qkv + (row * num_heads + head)[:, None] * HEAD_DIM + lane[None, :]
    low, high = tl.load(at, mask, other=0.0), tl.load(at + HALF, mask, other=0.0)
    angle = rope + tl.load(positions + row) * HEAD_DIM + lane
    cos = tl.load(angle, lane < HALF, other=0.0)[None, :]
    sin = tl.load(angle + HALF, lane < HALF, other=0.0)[None, :]
    wide_low, wide_high = low.to(tl.float32), high.to(tl.float32)
    is_v = (head >= num_q_heads + NUM_KV_HEADS)[:, None]
    # Rounded to the compute dtype first: the pool then holds what a reader of qkv would see.
    low = tl.where(is_v, low, (wide_low * cos - wide_high * sin).to(low.dtype))
    high = tl.where(is_v, high, (wide_high * cos + wide_low * sin).to(high.dtype))
    tl.store(at, low, mask & ~is_v)
    tl.store(at + HALF, high, mask & ~is_v)

    slot = tl.load(slots + row)
    kv_head = (head - num_q_heads) % NUM_KV_HEADS
    half_of_pool = (head - num_q_heads) // NUM_KV_HEADS
    in_block = ((kv_head * 2 + half_of_pool) * BLOCK_SIZE + slot % BLOCK_SIZE) * HEAD_DIM
    to = pool + (slot // BLOCK_SIZE) * block_stride + in_block[:, None] + lane[None, :]
    kept = mask & (head >= num_q_heads)[:, None] & (slot >= 0)
    scale = tl.where(is_v, v_scale, k_scale)
    store_kv(to, low.to(tl.float32), scale, kept, FORMAT)
    store_kv(to + HALF, high.to(tl.float32), scale, kept, FORMAT)


def rope_and_store(
    qkv: torch.Tensor,
    rope: torch.Tensor,
    positions: torch.Tensor,
    slots: torch.Tensor,
    layer_pool: torch.Tensor,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
) -> None:
    """Rotate q and k inside qkv IN PLACE, then write k and v to `slots` of one layer.

    qkv [T, (heads + 2 * kv heads) * head_dim] contiguous; rope fp32 [positions, 2, head_dim / 2], cosines
    then sines; positions and slots int64 [T]; layer_pool [num_blocks, kv heads, 2, block_size, head_dim], a
    block contiguous, is given k / k_scale and v / v_scale (for fp8). A row whose slot is negative (padding of
    a captured graph) stores nothing.
    """
    if not qkv.is_contiguous():
        raise ValueError(f"rope_and_store works in place on contiguous rows, got strides {qkv.stride()}")
    pool, kv_format = stored(layer_pool)
    _, num_kv_heads, _, block_size, head_dim = pool.shape
    num_heads = qkv.shape[1] // head_dim
    grid = (qkv.shape[0], triton.cdiv(num_heads, HEADS_PER_PROGRAM))
    rope_and_store_kernel[grid](
        qkv,
        rope,
        positions,
        slots,
        pool,
        pool.stride(0),
        num_heads - 2 * num_kv_heads,
        k_scale,
        v_scale,
        NUM_KV_HEADS=num_kv_heads,
        HEAD_DIM=head_dim,
        HALF_PAD=padded(head_dim) // 2,
        BLOCK_SIZE=block_size,
        HEADS=HEADS_PER_PROGRAM,
        FORMAT=kv_format,
        num_warps=4,
    )
