"""The kernel set for CUDA devices: this package's kernels, cuBLAS for matrix products."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import torch
import torch.nn.functional as F

from core.kv import KVLayout
from engine.batch import Batch
from engine.kernels.triton import activation, norm
from engine.kernels.triton.block_copy import gather_blocks, scatter_blocks
from engine.kernels.triton.decode import decode_attention
from engine.kernels.triton.prefill import prefill_attention
from engine.kernels.triton.rope import rope_and_store
from engine.kv_cache import KVCache


@dataclass(frozen=True, slots=True)
class _Plan:
    """`max_q_len`: new tokens of the longest chunk behind the decodes, 0 when there are only decodes."""

    batch: Batch
    max_q_len: int


class TritonKernels:
    """The tensors of a `Batch` and the pool must be on the device of the weights.

    `sliding_window` > 0: every token sees itself and the sliding_window - 1 tokens before it.
    """

    name = "triton"

    def __init__(self, sliding_window: int = 0) -> None:
        self._window = sliding_window

    def plan(self, batch: Batch, cache: KVCache) -> _Plan:
        chunks = pairwise(batch.q_starts[batch.num_decodes :])
        return _Plan(batch, max((end - start for start, end in chunks), default=0))

    def embed(self, token_ids: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return F.embedding(token_ids, weight)

    def linear(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        return F.linear(x, weight, bias)

    def logits(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """In fp32 straight from the sums: rounding logits to 16 bits first would tie the best tokens."""
        if x.is_cuda and x.dtype != torch.float32:
            return torch.mm(x, weight.T, out_dtype=torch.float32)
        return F.linear(x, weight).float()

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        return norm.rms_norm(x, weight, eps)

    def add_rms_norm(
        self, delta: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> torch.Tensor:
        return norm.add_rms_norm(delta, residual, weight, eps)

    def silu_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        return activation.silu_mul(gate_up)

    def head_norm(
        self, qkv: torch.Tensor, q_weight: torch.Tensor, k_weight: torch.Tensor, eps: float, layout: KVLayout
    ) -> None:
        norm.head_norm(qkv, q_weight, k_weight, eps, layout)

    def rope_and_store(
        self, qkv: torch.Tensor, rope: torch.Tensor, batch: Batch, cache: KVCache, layer: int
    ) -> None:
        rope_and_store(qkv, rope, batch.positions, batch.slots, cache.pool[:, layer])

    def attention(self, qkv: torch.Tensor, cache: KVCache, layer: int, plan: _Plan) -> torch.Tensor:
        batch, layout, pool = plan.batch, cache.layout, cache.pool[:, layer]
        out = qkv.new_empty(qkv.shape[0], qkv.shape[1] - 2 * layout.num_kv_heads * layout.head_dim)
        lens, tables = batch.kv_lens, batch.block_tables
        if batch.num_decodes:
            decode_attention(qkv, pool, out, batch.num_decodes, lens, tables, self._window)
        if plan.max_q_len:
            starts, first, longest = batch.row_starts, batch.num_decodes, plan.max_q_len
            prefill_attention(qkv, pool, out, starts, first, longest, lens, tables, self._window)
        return out

    def gather_blocks(
        self,
        pool: torch.Tensor,
        block_ids: torch.Tensor,
        buffer: torch.Tensor,
        heads: range | None = None,
        buffer_heads: range | None = None,
    ) -> None:
        gather_blocks(pool, block_ids, buffer, heads, buffer_heads)

    def scatter_blocks(
        self,
        pool: torch.Tensor,
        block_ids: torch.Tensor,
        buffer: torch.Tensor,
        heads: range | None = None,
        buffer_heads: range | None = None,
    ) -> None:
        scatter_blocks(pool, block_ids, buffer, heads, buffer_heads)
