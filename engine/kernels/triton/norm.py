"""RMS norm: of rows, of rows behind the addition to the residual stream, of the heads inside rows."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from core.kv import KVLayout

_TILE = 2048
"""Numbers of a program's tile: several narrow rows, or one wide row (then more)."""


HEADS_PER_PROGRAM = 8


@triton.jit(do_not_specialize=["num_rows"])
def rms_norm_kernel(
    x,
    delta,
    weight,
    out,
    num_rows,
    eps,
    WIDTH: tl.constexpr,
    WIDTH_PAD: tl.constexpr,
    ROWS: tl.constexpr,
    ADD: tl.constexpr,
):
    """Rows of x [num_rows, WIDTH], all contiguous; with ADD, x += delta first, in x's dtype."""
    rows = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    columns = tl.arange(0, WIDTH_PAD)
    at = rows[:, None] * WIDTH + columns[None, :]
    mask = (rows < num_rows)[:, None] & (columns < WIDTH)[None, :]
    wide = tl.load(x + at, mask, other=0.0).to(tl.float32)
    if ADD:
        wide += tl.load(delta + at, mask, other=0.0).to(tl.float32)
        # The norm sees what the stream holds from now on, rounded to its dtype.
        rounded = wide.to(x.dtype.element_ty)
        tl.store(x + at, rounded, mask)
        wide = rounded.to(tl.float32)
    scale = tl.rsqrt(tl.sum(wide * wide, 1) / WIDTH + eps)
    gain = tl.load(weight + columns, columns < WIDTH, other=0.0).to(tl.float32)
    tl.store(out + at, (wide * scale[:, None] * gain[None, :]).to(out.dtype.element_ty), mask)


@triton.jit
def head_norm_kernel(
    qkv,
    q_weight,
    k_weight,
    num_q_heads,
    num_heads,
    eps,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIM_PAD: tl.constexpr,
    HEADS: tl.constexpr,
):
    """HEADS heads of one row of qkv, in place; v heads stay as they are."""
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    lane = tl.arange(0, DIM_PAD)
    in_head = (lane < HEAD_DIM)[None, :]
    mask = (head < num_q_heads + NUM_KV_HEADS)[:, None] & in_head
    at = qkv + (row * num_heads + head)[:, None] * HEAD_DIM + lane[None, :]
    wide = tl.load(at, mask, other=0.0).to(tl.float32)
    scale = tl.rsqrt(tl.sum(wide * wide, 1) / HEAD_DIM + eps)
    of_q = tl.load(q_weight + lane, lane < HEAD_DIM, other=0.0).to(tl.float32)
    of_k = tl.load(k_weight + lane, lane < HEAD_DIM, other=0.0).to(tl.float32)
    gain = tl.where((head < num_q_heads)[:, None], of_q[None, :], of_k[None, :])
    tl.store(at, (wide * scale[:, None] * gain).to(qkv.dtype.element_ty), mask)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """x [T, width] / sqrt(mean(x^2) + eps) * weight, in x's dtype."""
    return _launch(x, None, weight, eps)


def add_rms_norm(
    delta: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> torch.Tensor:
    """residual += delta IN PLACE, then its RMS norm; both [T, width] of one dtype."""
    return _launch(residual, delta.contiguous(), weight, eps)


def head_norm(
    qkv: torch.Tensor, q_weight: torch.Tensor, k_weight: torch.Tensor, eps: float, layout: KVLayout
) -> None:
    """RMS norm of every q and k head of qkv [T, (heads + 2 * kv heads) * head_dim] IN PLACE.

    Weights: [head_dim]. Raises ValueError for rows that are not contiguous.
    """
    if not qkv.is_contiguous():
        raise ValueError(f"head_norm works in place on contiguous rows, got strides {qkv.stride()}")
    num_heads = qkv.shape[1] // layout.head_dim
    num_normed = num_heads - layout.num_kv_heads
    head_norm_kernel[(qkv.shape[0], triton.cdiv(num_normed, HEADS_PER_PROGRAM))](
        qkv,
        q_weight,
        k_weight,
        num_normed - layout.num_kv_heads,
        num_heads,
        eps,
        NUM_KV_HEADS=layout.num_kv_heads,
        HEAD_DIM=layout.head_dim,
        DIM_PAD=triton.next_power_of_2(layout.head_dim),
        HEADS=HEADS_PER_PROGRAM,
    )


def launch_options(width: int) -> dict[str, int]:
    """Constexprs and options that follow from the width alone."""
    width_pad = triton.next_power_of_2(width)
    rows = max(1, _TILE // width_pad)
    num_warps = 4 if width_pad <= _TILE else 8 if width_pad <= 4 * _TILE else 16
    return {"WIDTH": width, "WIDTH_PAD": width_pad, "ROWS": rows, "num_warps": num_warps}


def _launch(x: torch.Tensor, delta: torch.Tensor | None, weight: torch.Tensor, eps: float) -> torch.Tensor:
    if not x.is_contiguous():
        raise ValueError(
            f"rms_norm needs contiguous rows, got strides {x.stride()}; call .contiguous() first"
        )
    out = torch.empty_like(x)
    num_rows, width = x.shape
    options = launch_options(width)
    grid = (triton.cdiv(num_rows, options["ROWS"]),)
    add = delta is not None
    rms_norm_kernel[grid](x, delta if add else x, weight, out, num_rows, eps, ADD=add, **options)
    return out
