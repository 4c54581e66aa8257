"""Blocks and slices of their heads between a pool and a buffer: random cases, checked for any kernel set.

Used by tests/engine (on the CPU, and interpreted) and by tests/gpu (compiled).
"""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from hypothesis import strategies as st
from triton_cases import DEVICE, HEAD_DIMS, NUM_LAYERS, kv_dtypes, seeds

from core.kv import BLOCK_SIZES
from engine.kernels import reference
from engine.kernels.interface import Kernels


@dataclass(frozen=True)
class CopyCase:
    """Pool and buffer have `num_heads` KV heads each, of which `count` are copied, from `first` on.

    `apart`: bytes between two blocks of the pool, as behind one band of layers. `whole`: no heads are named.
    """

    kv_dtype: torch.dtype
    num_heads: tuple[int, int]
    first: tuple[int, int]
    count: int
    whole: bool
    head_dim: int
    block_size: int
    num_blocks: int
    chosen: int
    apart: int
    seed: int

    def heads(self, side: int) -> range:
        return range(self.first[side], self.first[side] + self.count)


@st.composite
def copy_cases(draw: st.DrawFn) -> CopyCase:
    whole, num_blocks = draw(st.booleans()), draw(st.integers(1, 8))
    ours = draw(st.integers(1, 5))
    theirs = ours if whole else draw(st.integers(1, 5))
    count = ours if whole else draw(st.integers(1, min(ours, theirs)))
    return CopyCase(
        kv_dtype=draw(kv_dtypes),
        num_heads=(ours, theirs),
        first=(draw(st.integers(0, ours - count)), draw(st.integers(0, theirs - count))),
        count=count,
        whole=whole,
        head_dim=draw(st.sampled_from(HEAD_DIMS)),
        block_size=draw(st.sampled_from(BLOCK_SIZES)),
        num_blocks=num_blocks,
        chosen=draw(st.integers(1, num_blocks)),
        apart=draw(st.sampled_from([0, 64])),
        seed=draw(seeds),
    )


def check_copies(kernels: Kernels, case: CopyCase) -> None:
    """Like the twins, bit for bit, NaN and all, in the order asked for; nothing else is touched."""
    torch.manual_seed(case.seed)
    pool = _blocks(case, case.num_blocks, case.num_heads[0], case.apart)
    buffer = _blocks(case, case.chosen, case.num_heads[1])
    ids = torch.randperm(case.num_blocks)[: case.chosen]
    heads, buffer_heads = case.heads(0), case.heads(1)
    given = (None, None) if case.whole else (heads, buffer_heads)

    want = _raw(buffer).clone()
    reference.gather_blocks(_raw(pool), ids, want, heads, buffer_heads)
    kernels.gather_blocks(pool, ids.to(DEVICE), buffer, *given)
    assert torch.equal(_raw(buffer), want)

    buffer = _blocks(case, case.chosen, case.num_heads[1])
    want = _raw(pool).clone()
    reference.scatter_blocks(want, ids, _raw(buffer), heads, buffer_heads)
    kernels.scatter_blocks(pool, ids.int().to(DEVICE), buffer, *given)
    assert torch.equal(_raw(pool), want)


def check_refusals(kernels: Kernels) -> None:
    pool, ids = torch.zeros(4, 1, 2, 2, 8, 64), torch.tensor([0])
    fitting = torch.zeros(1, 1, 2, 2, 8, 64)
    with pytest.raises(ValueError, match=r"do not fit a buffer \(2, 1, 2, 2, 8, 64\)"):
        kernels.gather_blocks(pool, ids, torch.zeros(2, 1, 2, 2, 8, 64))
    with pytest.raises(ValueError, match="do not fit a buffer"):
        kernels.scatter_blocks(pool, ids, fitting.bfloat16())
    with pytest.raises(ValueError, match=r"heads range\(1, 3\) are no run of 2 KV heads"):
        kernels.gather_blocks(pool, ids, fitting, range(1, 3), range(2))
    with pytest.raises(ValueError, match="1 heads of the pool do not fit 2 of the buffer"):
        kernels.scatter_blocks(pool, ids, fitting, range(1, 2))
    with pytest.raises(ValueError, match="each block must be dense"):
        kernels.gather_blocks(pool.transpose(3, 4), ids, fitting.transpose(3, 4).contiguous())


def _blocks(case: CopyCase, count: int, num_heads: int, apart: int = 0) -> torch.Tensor:
    """Random bytes as blocks [count, layers, num_heads, 2, block_size, head_dim]."""
    shape = (NUM_LAYERS, num_heads, 2, case.block_size, case.head_dim)
    nbytes = torch.Size(shape).numel() * case.kv_dtype.itemsize
    raw = torch.randint(0, 256, (count, nbytes + apart), dtype=torch.uint8).to(DEVICE)
    return raw[:, :nbytes].view(case.kv_dtype).unflatten(1, shape)


def _raw(blocks: torch.Tensor) -> torch.Tensor:
    """On the CPU as bytes [count, layers, heads, bytes of a head]: as numbers, NaN would equal nothing."""
    return blocks.view(torch.uint8).flatten(3).cpu()
