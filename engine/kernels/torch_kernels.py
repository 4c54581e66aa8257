"""The kernel set that needs nothing but torch; `engine.kernels.native` speeds up its hot parts."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from core.kv import KVLayout
from engine.batch import Batch
from engine.kernels import reference
from engine.kv_cache import KVCache

LOGITS_SLICE = 2048
"""Rows of the LM head that are widened to fp32 at once; a slice of them stays in the CPU's cache."""


@dataclass(frozen=True, slots=True)
class Span:
    """One sequence's rows of a step and where its K and V are.

    `rows`: index of its blocks in `KVCache.rows` for layer 0, int64 [2 * kv heads * blocks]; None when
    all of its K and V are in the step's own rows. `visible`: bool [rows, kv_len], None when
    the plain causal rule (or, for a single row, no rule) says the same.
    """

    first: int
    end: int
    kv_len: int
    rows: torch.Tensor | None
    visible: torch.Tensor | None


class TorchKernels:
    """Attention gathers a sequence's blocks with one `index_select` a layer, then calls SDPA.

    K and V are cut to the sequence's length before they are used, so unused slots never meet a
    softmax weight of zero (0 * NaN is NaN).
    """

    name = "torch"

    def plan(self, batch: Batch, cache: KVCache) -> list[Span]:
        return spans(batch, cache, first_seq=0)

    def linear(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        return F.linear(x, weight, bias)

    def logits(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """Widened slice by slice: results rounded to bf16 would tie the best tokens."""
        if x.dtype == torch.float32:
            return F.linear(x, weight)
        wide = x.float()
        out = wide.new_empty(x.shape[0], weight.shape[0])
        for first in range(0, weight.shape[0], LOGITS_SLICE):
            part = weight[first : first + LOGITS_SLICE].float()
            torch.mm(wide, part.T, out=out[:, first : first + LOGITS_SLICE])
        return out

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        return reference.rms_norm(x, weight, eps)

    def add_rms_norm(
        self, delta: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> torch.Tensor:
        return self.rms_norm(residual.add_(delta), weight, eps)

    def silu_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        return F.silu(gate).mul_(up)

    def head_norm(
        self, qkv: torch.Tensor, q_weight: torch.Tensor, k_weight: torch.Tensor, eps: float, layout: KVLayout
    ) -> None:
        reference.head_norm(qkv, q_weight, k_weight, eps, layout)

    def rope_and_store(
        self, qkv: torch.Tensor, rope: torch.Tensor, batch: Batch, cache: KVCache, layer: int
    ) -> None:
        heads = _split_heads(qkv, cache)
        num_kv = cache.layout.num_kv_heads
        rotated = heads[:, : heads.shape[1] - num_kv]
        rotated.copy_(reference.rotate(rotated, rope, batch.positions))
        blocks, offsets = batch.slots // batch.block_size, batch.slots % batch.block_size
        dtype = cache.pool.dtype
        cache.keys(layer)[blocks, :, offsets] = heads[:, -2 * num_kv : -num_kv].to(dtype)
        cache.values(layer)[blocks, :, offsets] = heads[:, -num_kv:].to(dtype)

    def attention(self, qkv: torch.Tensor, cache: KVCache, layer: int, plan: list[Span]) -> torch.Tensor:
        heads = _split_heads(qkv, cache)
        num_heads = heads.shape[1] - 2 * cache.layout.num_kv_heads
        out = qkv.new_empty(qkv.shape[0], num_heads, cache.layout.head_dim)
        attend_spans(heads, cache, layer, plan, out)
        return out.view(qkv.shape[0], -1)


def spans(batch: Batch, cache: KVCache, first_seq: int) -> list[Span]:
    """The spans of all sequences from `first_seq` on."""
    lens = batch.kv_lens.tolist()
    return [_span(batch, cache, seq, lens[seq]) for seq in range(first_seq, batch.num_seqs)]


def _span(batch: Batch, cache: KVCache, seq: int, kv_len: int) -> Span:
    first, end = batch.q_starts[seq], batch.q_starts[seq + 1]
    from_start = end - first == kv_len
    rows = visible = None
    if not from_start:
        num_blocks = -(-kv_len // batch.block_size)
        rows = cache.row_index(batch.block_tables[seq, :num_blocks]).flatten()
        if end - first > 1:
            visible = torch.arange(kv_len) <= batch.positions[first:end, None]
    return Span(first, end, kv_len, rows, visible)


def attend_spans(
    heads: torch.Tensor, cache: KVCache, layer: int, plan: list[Span], out: torch.Tensor
) -> None:
    """Attention of each span's rows into `out` [T, heads, head_dim]; `heads`: see `_split_heads`."""
    num_heads, num_kv = out.shape[1], cache.layout.num_kv_heads
    for span in plan:
        q = heads[span.first : span.end, :num_heads]
        if span.rows is None:
            own = heads[span.first : span.end, num_heads:].transpose(0, 1)
            k, v = own[:num_kv], own[num_kv:]
            if cache.pool.dtype != out.dtype:
                # The same rounding as a later reader of the cache sees, so chunking changes nothing.
                k, v = k.to(cache.pool.dtype).to(out.dtype), v.to(cache.pool.dtype).to(out.dtype)
        else:
            k, v = _gather(cache, layer, span)
            k, v = k.to(out.dtype), v.to(out.dtype)
        out[span.first : span.end] = _attend(q, k, v, span)


def _attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, span: Span) -> torch.Tensor:
    """q [n, heads, head_dim], k and v [kv heads, kv_len, head_dim] -> [n, heads, head_dim]."""
    n, num_heads, head_dim = q.shape
    if n == 1:
        # The query heads of one KV head stand in for rows, so that K and V are read once for all.
        grouped = q.reshape(1, k.shape[0], -1, head_dim)
        return F.scaled_dot_product_attention(grouped, k[None], v[None]).view(1, num_heads, head_dim)
    result = F.scaled_dot_product_attention(
        q.transpose(0, 1)[None],
        k[None],
        v[None],
        attn_mask=span.visible,
        is_causal=span.visible is None,
        enable_gqa=num_heads != k.shape[0],
    )
    return result[0].transpose(0, 1)


def _gather(cache: KVCache, layer: int, span: Span) -> tuple[torch.Tensor, torch.Tensor]:
    """K and V of one layer, [kv heads, kv_len, head_dim] each, in the cache's dtype."""
    assert span.rows is not None
    layout = cache.layout
    picked = cache.rows.index_select(0, span.rows + layer * layout.num_kv_heads * 2)
    k, v = picked.view(2, layout.num_kv_heads, -1, layout.head_dim)[:, :, : span.kv_len]
    return k, v


def _split_heads(qkv: torch.Tensor, cache: KVCache) -> torch.Tensor:
    """View [T, heads + 2 * kv heads, head_dim]: q heads, k heads, v heads."""
    return qkv.view(qkv.shape[0], -1, cache.layout.head_dim)
