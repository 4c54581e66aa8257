"""The Llama decoder (Touvron et al. 2023) over one step's batch and the paged KV pool."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from checkpoint.config import ModelConfig
from engine.batch import Batch
from engine.kernels.interface import Kernels
from engine.kv_cache import KVCache
from engine.models.parameter import Parameter
from engine.models.rope import rope_table


@dataclass(frozen=True, slots=True)
class _Layer:
    """Matrices are [out, in]; `next_norm` is the input norm of the next layer, or the final norm."""

    qkv: torch.Tensor
    o: torch.Tensor
    post_norm: torch.Tensor
    gate_up: torch.Tensor
    down: torch.Tensor
    next_norm: torch.Tensor


class Llama:
    """`weights`: the tensors of `parameters`, all in the compute dtype.

    `max_model_len` bounds the positions that can be asked for.
    """

    def __init__(
        self,
        config: ModelConfig,
        weights: Mapping[str, torch.Tensor],
        kernels: Kernels,
        max_model_len: int | None = None,
    ) -> None:
        self.config = config
        self.kernels = kernels
        self._embed = weights["embed"]
        self._lm_head = weights["embed" if config.tie_word_embeddings else "lm_head"]
        self._first_norm = weights["layers.0.input_norm"]
        self.num_positions = max_model_len or config.max_position
        self._rope = rope_table(config, self.num_positions)
        self._layers = [_layer(weights, i, config.num_layers) for i in range(config.num_layers)]

    @staticmethod
    def parameters(config: ModelConfig) -> list[Parameter]:
        """What a checkpoint must hold: q, k, v and gate, up are fused; a tied LM head is not stored."""
        hidden, vocab = config.hidden_size, config.vocab_size
        found = [
            Parameter.single("embed", "model.embed_tokens.weight", vocab, hidden),
            Parameter.single("final_norm", "model.norm.weight", hidden),
        ]
        if not config.tie_word_embeddings:
            found.append(Parameter.single("lm_head", "lm_head.weight", vocab, hidden))
        for i in range(config.num_layers):
            found += _layer_parameters(config, i)
        return found

    def forward(self, batch: Batch, cache: KVCache) -> torch.Tensor:
        """fp32 logits [R, vocab] of `batch.logits_rows`; writes K and V of every row into `cache`."""
        kernels, eps = self.kernels, self.config.rms_norm_eps
        plan = kernels.plan(batch, cache)
        residual = F.embedding(batch.token_ids, self._embed)
        x = kernels.rms_norm(residual, self._first_norm, eps)
        rows, last = batch.logits_rows, len(self._layers) - 1
        for i, layer in enumerate(self._layers):
            qkv = kernels.linear(x, layer.qkv)
            kernels.rope_and_store(qkv, self._rope, batch, cache, i)
            if i == last and not len(rows):
                return residual.new_empty((0, self.config.vocab_size), dtype=torch.float32)
            x = kernels.attention(qkv, cache, i, plan)
            if i == last:
                # Past the last K and V, only rows whose logits are wanted matter.
                x, residual = x[rows], residual[rows]
            x = kernels.add_rms_norm(kernels.linear(x, layer.o), residual, layer.post_norm, eps)
            x = kernels.linear(kernels.silu_mul(kernels.linear(x, layer.gate_up)), layer.down)
            x = kernels.add_rms_norm(x, residual, layer.next_norm, eps)
        return kernels.logits(x, self._lm_head)


def _layer(weights: Mapping[str, torch.Tensor], i: int, num_layers: int) -> _Layer:
    def of(name: str) -> torch.Tensor:
        return weights[f"layers.{i}.{name}"]

    is_last = i == num_layers - 1
    next_norm = weights["final_norm" if is_last else f"layers.{i + 1}.input_norm"]
    return _Layer(of("qkv"), of("o"), of("post_norm"), of("gate_up"), of("down"), next_norm)


def _layer_parameters(config: ModelConfig, i: int) -> list[Parameter]:
    hidden, inner = config.hidden_size, config.intermediate_size
    q, kv = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    ours, theirs = f"layers.{i}.", f"model.layers.{i}."

    def fused(name: str, module: str, **rows: int) -> Parameter:
        sources = tuple(f"{theirs}{module}.{part}.weight" for part in rows)
        return Parameter(ours + name, (sum(rows.values()), hidden), sources, tuple(rows.values()))

    return [
        Parameter.single(ours + "input_norm", theirs + "input_layernorm.weight", hidden),
        fused("qkv", "self_attn", q_proj=q, k_proj=kv, v_proj=kv),
        Parameter.single(ours + "o", theirs + "self_attn.o_proj.weight", hidden, q),
        Parameter.single(ours + "post_norm", theirs + "post_attention_layernorm.weight", hidden),
        fused("gate_up", "mlp", gate_proj=inner, up_proj=inner),
        Parameter.single(ours + "down", theirs + "mlp.down_proj.weight", hidden, inner),
    ]
