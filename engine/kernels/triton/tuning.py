"""Tile shapes for CUDA, fixed: no request ever waits for a tuning run, and every pair is compiled ahead of time.

The tables are keyed by the head dim padded to a power of two and the bytes of the wider of compute and KV dtype.
`benchmarks.triton_aot` compiles them for sm_80, sm_90 and sm_100 and fails on a spill. Shared memory stays below
the 99 KiB a block may have on sm_86 and sm_89, so that no card since Ampere needs a table of its own.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from triton import knobs


@dataclass(frozen=True, slots=True)
class Tile:
    """`rows` of queries and `tokens` of K and V in flight, and how Triton schedules them."""

    rows: int
    tokens: int
    num_warps: int
    num_stages: int


_PREFILL = {
    (16, 2): Tile(128, 64, 4, 3),
    (32, 2): Tile(128, 64, 4, 3),
    (64, 2): Tile(128, 64, 4, 3),
    (128, 2): Tile(128, 64, 8, 2),
    (256, 2): Tile(64, 32, 8, 2),
    (16, 4): Tile(32, 32, 4, 2),
    (32, 4): Tile(32, 32, 4, 2),
    (64, 4): Tile(32, 32, 4, 2),
    (128, 4): Tile(32, 32, 8, 2),
    (256, 4): Tile(16, 16, 8, 2),
}

_DECODE = {
    (16, 2): Tile(16, 64, 4, 3),
    (32, 2): Tile(16, 64, 4, 3),
    (64, 2): Tile(16, 64, 4, 3),
    (128, 2): Tile(16, 64, 4, 2),
    (256, 2): Tile(16, 32, 4, 2),
    (16, 4): Tile(16, 32, 4, 2),
    (32, 4): Tile(16, 32, 4, 2),
    (64, 4): Tile(16, 32, 4, 2),
    (128, 4): Tile(16, 32, 4, 2),
    (256, 4): Tile(16, 16, 4, 2),
}

_INTERPRETED = Tile(16, 16, 4, 1)
"""Small, so that tests with a few dozen tokens walk through several tiles."""

_MIN_ROWS = 16
"""The fewest query rows that fill a tensor core instruction."""


def interpreted() -> bool:
    """Whether kernels run in Triton's interpreter (TRITON_INTERPRET=1), on tensors of the CPU."""
    return knobs.runtime.interpret


def padded(head_dim: int) -> int:
    """Triton's tiles have power-of-two sides; the lanes past `head_dim` are masked."""
    return max(16, triton.next_power_of_2(head_dim))


def prefill_tile(head_dim: int, dtype: torch.dtype, kv_dtype: torch.dtype) -> Tile:
    """Raises ValueError for head dims over 256."""
    return _pick(_PREFILL, head_dim, max(dtype.itemsize, kv_dtype.itemsize))


def decode_tile(head_dim: int, dtype: torch.dtype, kv_dtype: torch.dtype) -> Tile:
    """Raises ValueError for head dims over 256."""
    return _pick(_DECODE, head_dim, max(dtype.itemsize, kv_dtype.itemsize))


def decode_rows(group: int) -> int:
    """Query rows of a decode tile: one per head of the group, the rest is padding."""
    return max(_MIN_ROWS, triton.next_power_of_2(group))


def _pick(table: dict[tuple[int, int], Tile], head_dim: int, itemsize: int) -> Tile:
    key = (padded(head_dim), itemsize)
    if key not in table:
        raise ValueError(f"no Triton tile for head_dim {head_dim}; the largest is {max(table)[0]}")
    return _INTERPRETED if interpreted() else table[key]


def dot_dtype(dtype: torch.dtype) -> tl.dtype:
    """What matrix products multiply in; sums are fp32 always.

    The interpreter keeps bf16 as plain 16-bit integers and would multiply those, so there it is fp32.
    """
    if dtype == torch.float32 or (dtype == torch.bfloat16 and interpreted()):
        return tl.float32
    return tl.bfloat16 if dtype == torch.bfloat16 else tl.float16
