"""The gated activation of Llama's feed-forward layer."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

TILE = 1024


@triton.jit
def silu_mul_kernel(gate_up, out, width, TILE: tl.constexpr):
    """One tile of a row: gate_up [T, 2 * width], gate first, to out [T, width]."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * TILE + tl.arange(0, TILE)
    mask = columns < width
    at = gate_up + row * 2 * width + columns
    gate = tl.load(at, mask, other=0.0).to(tl.float32)
    up = tl.load(at + width, mask, other=0.0).to(tl.float32)
    value = gate * tl.sigmoid(gate) * up
    tl.store(out + row * width + columns, value.to(out.dtype.element_ty), mask)


def silu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """[T, 2 * n] -> silu(first half) * second half, [T, n], in the same dtype."""
    gate_up = gate_up.contiguous()
    num_rows, width = gate_up.shape[0], gate_up.shape[1] // 2
    out = gate_up.new_empty(num_rows, width)
    silu_mul_kernel[(num_rows, triton.cdiv(width, TILE))](gate_up, out, width, TILE=TILE)
    return out
