"""Tile shapes for CUDA, fixed: no request waits for a tuning run, and every entry is compiled ahead of time.

The tables are keyed by the head dim, padded to a power of two, and the kind of numbers:

    half     K, V and queries of 16 bits               fp32     K and V of 32 bits
    fp8      K and V of 8 bits, queries of 16          mixed    fp32 queries over narrower K and V

`benchmarks.triton_aot` compiles them for sm_80, sm_90 and sm_100 and fails on a spill. Shared memory stays
below the 99 KiB a block may have on sm_86 and sm_89, so that no card since Ampere needs a table of its own.
fp32 products are exact (no tensor cores): for checking a model, not for speed.
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
    (64, "half"): Tile(128, 64, 4, 2),
    (128, "half"): Tile(128, 32, 8, 3),
    (256, "half"): Tile(64, 32, 8, 3),
    (64, "fp8"): Tile(128, 64, 8, 2),
    (128, "fp8"): Tile(64, 64, 8, 2),
    (256, "fp8"): Tile(64, 32, 8, 2),
    (64, "fp32"): Tile(16, 16, 8, 2),
    (128, "fp32"): Tile(16, 16, 8, 2),
    (256, "fp32"): Tile(16, 16, 4, 2),
    (64, "mixed"): Tile(16, 16, 8, 2),
    (128, "mixed"): Tile(16, 16, 8, 2),
}

_DECODE = {
    (64, "half"): Tile(16, 64, 4, 3),
    (128, "half"): Tile(16, 64, 4, 3),
    (256, "half"): Tile(16, 32, 4, 2),
    (64, "fp8"): Tile(16, 32, 4, 3),
    (128, "fp8"): Tile(16, 64, 4, 2),
    (256, "fp8"): Tile(16, 32, 4, 2),
    (64, "fp32"): Tile(16, 16, 4, 2),
    (128, "fp32"): Tile(16, 16, 4, 2),
    (256, "fp32"): Tile(16, 16, 8, 2),
    (64, "mixed"): Tile(16, 16, 8, 2),
    (128, "mixed"): Tile(16, 16, 8, 2),
}

_INTERPRETED = Tile(16, 16, 4, 1)
"""Small, so that tests with a few dozen tokens walk through several tiles."""

_MIN_ROWS = 16
"""The fewest query rows that fill a tensor core instruction."""

_MIN_HEAD_DIM = 64
"""Narrower heads use the same tiles; only models made for tests have them."""


def interpreted() -> bool:
    """Whether kernels run in Triton's interpreter (TRITON_INTERPRET=1), on tensors of the CPU."""
    return knobs.runtime.interpret


def padded(head_dim: int) -> int:
    """Triton's tiles have power-of-two sides; the lanes past `head_dim` are masked."""
    return max(_MIN_HEAD_DIM, triton.next_power_of_2(head_dim))


def prefill_tile(head_dim: int, dtype: torch.dtype, kv_dtype: torch.dtype) -> Tile:
    """Raises ValueError for a pair of dtypes and a head dim that no kernel is made for."""
    return _pick(_PREFILL, head_dim, dtype, kv_dtype)


def decode_tile(head_dim: int, dtype: torch.dtype, kv_dtype: torch.dtype) -> Tile:
    """Like `prefill_tile`; its `rows` is the least, see `decode_rows`."""
    return _pick(_DECODE, head_dim, dtype, kv_dtype)


def decode_rows(group: int) -> int:
    """Query rows of a decode tile: one per head of the group, the rest is padding."""
    return max(_MIN_ROWS, triton.next_power_of_2(group))


def _pick(
    table: dict[tuple[int, str], Tile], head_dim: int, dtype: torch.dtype, kv_dtype: torch.dtype
) -> Tile:
    key = (padded(head_dim), _kind(dtype, kv_dtype))
    if key not in table:
        raise ValueError(
            f"no Triton attention for head_dim {head_dim} in {dtype} over a pool of {kv_dtype}; "
            "the largest head_dim is 256, or 128 for fp32 over a narrower pool"
        )
    return _INTERPRETED if interpreted() else table[key]


def _kind(dtype: torch.dtype, kv_dtype: torch.dtype) -> str:
    if kv_dtype.itemsize == 4:
        return "fp32"
    if dtype.itemsize == 4:
        return "mixed"
    return "half" if kv_dtype.itemsize == 2 else "fp8"


def dot_dtype(dtype: torch.dtype) -> tl.dtype:
    """What matrix products multiply in; sums are fp32 always.

    The interpreter keeps bf16 as plain 16-bit integers and would multiply those, so there it is fp32.
    """
    if dtype == torch.float32 or (dtype == torch.bfloat16 and interpreted()):
        return tl.float32
    return tl.bfloat16 if dtype == torch.bfloat16 else tl.float16
