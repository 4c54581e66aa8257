"""What a model asks of a kernel set; one set per kind of machine, the model never knows which.

All matrices are row-major, all rows are the tokens of a `Batch` (T of them). Compute dtype is that
of the weights; normalisation, rotary, softmax and every sum run in fp32 inside. The twins in
`engine.kernels.reference` say exactly what each call means.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch

from core.kv import KVLayout
from engine.batch import Batch
from engine.kv_cache import KVCache


class Kernels(Protocol):
    """Called under `torch.inference_mode`, from one thread at a time.

    A matrix named `weight` is what `load_weights` gave: a tensor, or in a set that runs on CPUs also an
    `engine.kernels.int8.QuantizedWeight`.
    """

    name: str

    def plan(self, batch: Batch, cache: KVCache) -> Any:
        """Work out once per step what `attention` needs in every layer; passed back to it as is."""
        ...

    def embed(self, token_ids: torch.Tensor, weight: Any) -> torch.Tensor:
        """Rows `token_ids` of weight [vocab, hidden] in the compute dtype, [T, hidden]."""
        ...

    def linear(self, x: torch.Tensor, weight: Any, bias: torch.Tensor | None = None) -> torch.Tensor:
        """x [T, in] times weight [out, in] transposed, plus bias [out], in x's dtype."""
        ...

    def logits(self, x: torch.Tensor, weight: Any) -> torch.Tensor:
        """Like `linear`, but fp32 out."""
        ...

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        """x [T, hidden] normalised over the last dim."""
        ...

    def add_rms_norm(
        self, delta: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> torch.Tensor:
        """Add `delta` to `residual` IN PLACE, then return its RMS norm. Both [T, hidden]."""
        ...

    def silu_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        """[T, 2 * n] -> silu(first half) * second half, [T, n]."""
        ...

    def head_norm(
        self, qkv: torch.Tensor, q_weight: torch.Tensor, k_weight: torch.Tensor, eps: float, layout: KVLayout
    ) -> None:
        """RMS norm of every q and k head inside qkv [T, (heads + 2 * kv heads) * head_dim] IN PLACE.

        Weights: [head_dim]. Call before `rope_and_store` (Qwen3).
        """
        ...

    def rope_and_store(
        self, qkv: torch.Tensor, rope: torch.Tensor, batch: Batch, cache: KVCache, layer: int
    ) -> None:
        """Rotate q and k inside qkv [T, (heads + 2 * kv heads) * head_dim] IN PLACE, then write k and v
        into `cache` at `batch.slots`, in its format. `rope`: fp32 [positions, 2, head_dim / 2], cosines
        then sines.
        """
        ...

    def attention(self, qkv: torch.Tensor, cache: KVCache, layer: int, plan: Any) -> torch.Tensor:
        """Causal attention of every row over its sequence's cached tokens, [T, heads * head_dim].

        Call after `rope_and_store` of the same layer: what counts is what is stored, also of the row's own
        chunk, so that rounding does not depend on how a prompt is cut. Slots past a sequence's end may hold
        anything, NaN included, and never reach the result. With a sliding window, entries of the block
        table that lie before it may name any block, and are not read.
        """
        ...

    def gather_blocks(
        self,
        pool: torch.Tensor,
        block_ids: torch.Tensor,
        buffer: torch.Tensor,
        heads: range | None = None,
        buffer_heads: range | None = None,
    ) -> None:
        """Copy heads `heads` of blocks `block_ids` of the pool to heads `buffer_heads` of `buffer`.

        pool: [num_blocks, layers, kv heads, ...]; buffer: [n, layers, kv heads, ...], n > 0, of the same
        dtype, whose number of heads may be another; each block of both is dense. block_ids: int32 or int64
        [n], distinct, on the pool's device. No heads given: all of them. For tiers and for peers of another
        tensor-parallel degree: called from any thread, also beside a step. Raises ValueError for shapes that
        do not fit and for heads that are not there.
        """
        ...

    def scatter_blocks(
        self,
        pool: torch.Tensor,
        block_ids: torch.Tensor,
        buffer: torch.Tensor,
        heads: range | None = None,
        buffer_heads: range | None = None,
    ) -> None:
        """The way back of `gather_blocks`: from the buffer to the pool, whose other heads stay."""
        ...
