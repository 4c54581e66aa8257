"""Runs steps of one model on one KV pool."""

from __future__ import annotations

import torch

from engine.batch import Batch, Chunk
from engine.kv_cache import KVCache
from engine.models.llama import Llama


class ModelRunner:
    """Not thread-safe: steps of one pool follow one another."""

    def __init__(self, model: Llama, cache: KVCache) -> None:
        self.model = model
        self.cache = cache

    @torch.inference_mode()
    def run(self, batch: Batch) -> torch.Tensor:
        """fp32 logits [R, vocab] in chunk order; K and V of every token are in the pool afterwards."""
        return self.model.forward(batch, self.cache)

    @torch.inference_mode()
    def copy_block(self, src: int, dst: int) -> None:
        """Copy one whole block inside the pool."""
        self.cache.copy_block(src, dst)

    def warm_up(self, num_tokens: int = 64) -> None:
        """Touch every weight and code path once. Call before the pool is in use: it writes the first blocks.

        Runs a chunk of up to `num_tokens` tokens, then a decode, so that the first request pays
        neither for page faults of mapped weights nor for one-time set-up inside the libraries.
        """
        layout, positions = self.cache.layout, self.model.num_positions
        num_tokens = min(num_tokens, self.cache.num_blocks * layout.block_size - 1, positions - 1)
        table = range(self.cache.num_blocks)
        prompt = Chunk([0] * num_tokens, 0, table, num_tokens - 1)
        for chunk in (prompt, Chunk([0], num_tokens, table, 0)):
            self.run(Batch.build([chunk], layout.block_size))
        self.cache.pool[: -(-(num_tokens + 1) // layout.block_size)] = 0
