"""The kernel set that needs nothing but torch; `engine.kernels.native` speeds up its hot parts."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from core.kv import KVLayout
from engine.batch import Batch
from engine.kernels import int8, reference
from engine.kernels.block_heads import paired_heads
from engine.kernels.int8 import QuantizedWeight, Weight
from engine.kv_cache import KVCache

LOGITS_SLICE = 2048
"""Rows of the LM head that are widened to fp32 at once; a slice of them stays in the CPU's cache."""


@dataclass(frozen=True, slots=True)
class Span:
    """One sequence's rows of a step and where the K and V are that they see.

    `block_ids`: its blocks, int32 [n]; None when all of its K and V are in the step's own rows. `tokens`:
    which of the tokens there some row sees.
    `visible`: bool [rows, tokens], None when the plain causal rule (or, for a single row, no rule) says
    the same.
    """

    first: int
    end: int
    tokens: slice
    block_ids: torch.Tensor | None
    visible: torch.Tensor | None


class TorchKernels:
    """Attention gathers the runs of a sequence's blocks, then calls SDPA.

    K and V are cut to the sequence's length before they are used, so unused slots never meet a
    softmax weight of zero (0 * NaN is NaN).

    `sliding_window` > 0: every token sees itself and the sliding_window - 1 tokens before it.
    """

    name = "torch"

    def __init__(self, sliding_window: int = 0) -> None:
        self._window = sliding_window

    def plan(self, batch: Batch, cache: KVCache) -> Any:
        lens = batch.kv_lens.tolist()
        return [_span(batch, seq, lens[seq], self._window) for seq in range(batch.num_seqs)]

    def embed(self, token_ids: torch.Tensor, weight: Weight) -> torch.Tensor:
        if isinstance(weight, QuantizedWeight):
            return int8.embed(token_ids, weight)
        return F.embedding(token_ids, weight)

    def linear(self, x: torch.Tensor, weight: Weight, bias: torch.Tensor | None = None) -> torch.Tensor:
        if isinstance(weight, QuantizedWeight):
            out = int8.linear(x, weight).to(x.dtype)
            return out if bias is None else out.add_(bias)
        return F.linear(x, weight, bias)

    def logits(self, x: torch.Tensor, weight: Weight) -> torch.Tensor:
        """Widened slice by slice: results rounded to bf16 would tie the best tokens."""
        if isinstance(weight, QuantizedWeight):
            return int8.linear(x, weight)
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
        cache.keys(layer).store(heads[:, -2 * num_kv : -num_kv], blocks, offsets)
        cache.values(layer).store(heads[:, -num_kv:], blocks, offsets)

    def attention(self, qkv: torch.Tensor, cache: KVCache, layer: int, plan: Any) -> torch.Tensor:
        heads = _split_heads(qkv, cache)
        num_heads = heads.shape[1] - 2 * cache.layout.num_kv_heads
        out = qkv.new_empty(qkv.shape[0], num_heads, cache.layout.head_dim)
        _attend_spans(heads, cache, layer, plan, out)
        return out.view(qkv.shape[0], -1)

    def gather_blocks(
        self,
        pool: torch.Tensor,
        block_ids: torch.Tensor,
        buffer: torch.Tensor,
        heads: range | None = None,
        buffer_heads: range | None = None,
    ) -> None:
        """Block by block: as fast as memory, and `index_select` would copy twice."""
        for ours, theirs in _block_pairs(pool, block_ids, buffer, heads, buffer_heads):
            theirs.copy_(ours)

    def scatter_blocks(
        self,
        pool: torch.Tensor,
        block_ids: torch.Tensor,
        buffer: torch.Tensor,
        heads: range | None = None,
        buffer_heads: range | None = None,
    ) -> None:
        """Block by block; `index_copy_` is 5 to 8 times slower."""
        for ours, theirs in _block_pairs(pool, block_ids, buffer, heads, buffer_heads):
            ours.copy_(theirs)


def _block_pairs(
    pool: torch.Tensor,
    block_ids: torch.Tensor,
    buffer: torch.Tensor,
    heads: range | None,
    buffer_heads: range | None,
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """The chosen heads of each block, in the pool and in the buffer."""
    chosen, partners = paired_heads(pool, block_ids, buffer, heads, buffer_heads)
    ours = pool[:, :, chosen.start : chosen.stop]
    theirs = buffer[:, :, partners.start : partners.stop]
    for nth, block_id in enumerate(block_ids.tolist()):
        yield ours[block_id], theirs[nth]


def _span(batch: Batch, seq: int, kv_len: int, window: int) -> Span:
    """With a window, tokens start with the first one that the first row sees; older blocks are not read."""
    first, end = batch.q_starts[seq], batch.q_starts[seq + 1]
    from_start = end - first == kv_len
    past = kv_len - (end - first)
    first_token = max(0, past + 1 - window) if window else 0
    skipped, block_ids, visible = 0, None, None
    if not from_start:
        first_block = first_token // batch.block_size
        skipped = first_block * batch.block_size
        block_ids = batch.block_tables[seq, first_block : -(-kv_len // batch.block_size)]
    if end - first > 1 and (window or not from_start):
        tokens, positions = torch.arange(first_token, kv_len), batch.positions[first:end, None]
        visible = tokens <= positions
        if window:
            visible &= tokens > positions - window
    return Span(first, end, slice(first_token - skipped, kv_len - skipped), block_ids, visible)


def _attend_spans(
    heads: torch.Tensor, cache: KVCache, layer: int, plan: list[Span], out: torch.Tensor
) -> None:
    """Attention of each span's rows into `out` [T, heads, head_dim]; `heads`: see `_split_heads`."""
    num_heads, num_kv = out.shape[1], cache.layout.num_kv_heads
    for span in plan:
        q = heads[span.first : span.end, :num_heads]
        if span.block_ids is None:
            own = heads[span.first : span.end, num_heads:].transpose(0, 1)
            # The same rounding as a later reader of the cache sees, so chunking changes nothing.
            k, v = cache.keys(layer).rounded(own[:num_kv]), cache.values(layer).rounded(own[num_kv:])
        else:
            k, v = (
                runs.load(span.block_ids)[:, span.tokens] for runs in (cache.keys(layer), cache.values(layer))
            )
        k, v = k.to(out.dtype), v.to(out.dtype)
        out[span.first : span.end] = _attend(q, k, v, span)


def _attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, span: Span) -> torch.Tensor:
    """q [n, heads, head_dim], k and v [kv heads, tokens, head_dim] -> [n, heads, head_dim]."""
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


def _split_heads(qkv: torch.Tensor, cache: KVCache) -> torch.Tensor:
    """View [T, heads + 2 * kv heads, head_dim]: q heads, k heads, v heads."""
    return qkv.view(qkv.shape[0], -1, cache.layout.head_dim)
