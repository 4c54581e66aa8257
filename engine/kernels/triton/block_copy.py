"""Whole blocks, or a slice of their KV heads, between the pool and one contiguous buffer.

    a block of the pool     layer 0: head 0 | head 1 | head 2    layer 1: head 0 | head 1 | head 2
    its heads 1 and 2                         ^^^^^^^^^^^^^^^                      ^^^^^^^^^^^^^^^   runs

Runs have one length and one distance; those of whole blocks touch and are one. Neighbouring threads copy
neighbouring 32-bit words of a run.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

TILE = 2048
"""Words of one program: 8 KiB."""


@triton.jit
def copy_kernel(
    pool,
    buffer,
    block_ids,
    block_words,
    run_words,
    run_distance,
    offset,
    num_runs,
    TO_POOL: tl.constexpr,
    TILE: tl.constexpr,
):
    """One tile of run program_id(1) of block_ids[program_id(0)], at `offset` words into each run's place."""
    nth, run = tl.program_id(0).to(tl.int64), tl.program_id(1)
    at = tl.program_id(2) * TILE + tl.arange(0, TILE)
    mask = at < run_words
    block = tl.load(block_ids + nth).to(tl.int64)
    in_pool = pool + block * block_words + run * run_distance + offset + at
    in_buffer = buffer + (nth * num_runs + run) * run_words + at
    if TO_POOL:
        tl.store(in_pool, tl.load(in_buffer, mask), mask)
    else:
        tl.store(in_buffer, tl.load(in_pool, mask), mask)


def gather_blocks(
    pool: torch.Tensor, block_ids: torch.Tensor, buffer: torch.Tensor, heads: range | None = None
) -> None:
    """Copy blocks `block_ids` (int32 or int64 [n]) of the pool into `buffer`, in that order.

    pool [num_blocks, layers, kv heads, 2, block_size, head_dim]; buffer the same with n for num_blocks and,
    given `heads`, len(heads) for kv heads. Both contiguous, of one dtype. Raises ValueError for a buffer of
    another shape and for heads that the pool does not have.
    """
    _copy(pool, block_ids, buffer, heads, to_pool=False)


def scatter_blocks(
    pool: torch.Tensor, block_ids: torch.Tensor, buffer: torch.Tensor, heads: range | None = None
) -> None:
    """The way back of `gather_blocks`. Block ids must be distinct: the order of writes is not defined."""
    _copy(pool, block_ids, buffer, heads, to_pool=True)


def _copy(
    pool: torch.Tensor, block_ids: torch.Tensor, buffer: torch.Tensor, heads: range | None, to_pool: bool
) -> None:
    num_layers, num_kv_heads = pool.shape[1:3]
    chosen = range(num_kv_heads) if heads is None else heads
    if chosen.step != 1 or not 0 <= chosen.start < chosen.stop <= num_kv_heads:
        raise ValueError(f"heads {chosen} are no run of the pool's {num_kv_heads} KV heads")
    wanted = (block_ids.shape[0], num_layers, len(chosen), *pool.shape[3:])
    if tuple(buffer.shape) != wanted or buffer.dtype != pool.dtype or not buffer.is_contiguous():
        given = f"{tuple(buffer.shape)} of {buffer.dtype}, strides {buffer.stride()}"
        raise ValueError(f"the buffer must be contiguous {wanted} of {pool.dtype}, got {given}")
    words = pool[0, 0, 0].nbytes // 4
    block_words, distance = num_layers * num_kv_heads * words, num_kv_heads * words
    num_runs, run_words = num_layers, len(chosen) * words
    if run_words == distance:
        num_runs, run_words = 1, block_words
    copy_kernel[(len(block_ids), num_runs, triton.cdiv(run_words, TILE))](
        _as_words(pool),
        _as_words(buffer),
        block_ids,
        block_words,
        run_words,
        distance,
        chosen.start * words,
        num_runs,
        TO_POOL=to_pool,
        TILE=TILE,
    )


def _as_words(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(-1).view(torch.int32)
