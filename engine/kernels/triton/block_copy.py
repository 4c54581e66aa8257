"""Blocks, or a slice of their KV heads, between the pool and a buffer whose blocks follow one another.

    a block of the pool        layer 0: head 0 | head 1 | head 2    layer 1: head 0 | head 1 | head 2
    its heads 1 and 2                            ^^^^^^^^^^^^^^^                      ^^^^^^^^^^^^^^^   runs
    a block of the buffer      layer 0: head 1 | head 2    layer 1: head 1 | head 2

Runs of one side have one distance; those of whole blocks touch on both sides and are one. Neighbouring
threads copy neighbouring 32-bit words of a run.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from engine.kernels.block_heads import paired_heads

TILE = 2048
"""Words of one program: 8 KiB."""


@triton.jit
def copy_kernel(
    pool,
    buffer,
    block_ids,
    pool_block_words,
    pool_distance,
    buffer_block_words,
    buffer_distance,
    run_words,
    TO_POOL: tl.constexpr,
    TILE: tl.constexpr,
):
    """One tile of run program_id(1) of block_ids[program_id(0)]; the pointers are those of the first run."""
    nth, run = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    at = tl.program_id(2) * TILE + tl.arange(0, TILE)
    mask = at < run_words
    block = tl.load(block_ids + nth).to(tl.int64)
    in_pool = pool + block * pool_block_words + run * pool_distance + at
    in_buffer = buffer + nth * buffer_block_words + run * buffer_distance + at
    if TO_POOL:
        tl.store(in_pool, tl.load(in_buffer, mask), mask)
    else:
        tl.store(in_buffer, tl.load(in_pool, mask), mask)


def gather_blocks(
    pool: torch.Tensor,
    block_ids: torch.Tensor,
    buffer: torch.Tensor,
    heads: range | None = None,
    buffer_heads: range | None = None,
) -> None:
    """See `interface.Kernels.gather_blocks`. A head's bytes must be a multiple of 4."""
    _copy(pool, block_ids, buffer, heads, buffer_heads, to_pool=False)


def scatter_blocks(
    pool: torch.Tensor,
    block_ids: torch.Tensor,
    buffer: torch.Tensor,
    heads: range | None = None,
    buffer_heads: range | None = None,
) -> None:
    """The way back; with block ids that are not distinct the order of writes is not defined."""
    _copy(pool, block_ids, buffer, heads, buffer_heads, to_pool=True)


def _copy(
    pool: torch.Tensor,
    block_ids: torch.Tensor,
    buffer: torch.Tensor,
    heads: range | None,
    buffer_heads: range | None,
    to_pool: bool,
) -> None:
    chosen, partners = paired_heads(pool, block_ids, buffer, heads, buffer_heads)
    num_layers, num_kv_heads = pool.shape[1:3]
    words = pool[0, 0, 0].nbytes // 4
    pool_distance, buffer_distance = num_kv_heads * words, buffer.shape[2] * words
    num_runs, run_words = num_layers, len(chosen) * words
    if run_words == pool_distance == buffer_distance:
        num_runs, run_words = 1, num_layers * run_words
    copy_kernel[(len(block_ids), num_runs, triton.cdiv(run_words, TILE))](
        _words_from(pool, chosen.start * words),
        _words_from(buffer, partners.start * words),
        block_ids,
        pool.stride(0) * pool.element_size() // 4,
        pool_distance,
        buffer.stride(0) * buffer.element_size() // 4,
        buffer_distance,
        run_words,
        TO_POOL=to_pool,
        TILE=TILE,
    )


def _words_from(blocks: torch.Tensor, offset: int) -> torch.Tensor:
    """The words of a tensor of dense blocks from `offset` on, which all its blocks are reached from."""
    first = blocks[0].view(-1).view(torch.int32)
    return first[offset:]
