"""The Llama decoder (Touvron et al. 2023) over one step's batch and the paged KV pool.

Mistral is Llama whose kernels attend within a window; Qwen2 adds a bias to q, k and v; Qwen3
normalises each head of q and k.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from checkpoint.config import ModelConfig
from engine.batch import Batch
from engine.kernels.int8 import Weight
from engine.kernels.interface import Kernels
from engine.kv_cache import KVCache
from engine.models.parameter import Parameter, Split
from engine.models.rope import rope_table
from engine.parallel import Group


@dataclass(frozen=True, slots=True)
class _Layer:
    """Matrices are [out, in]; `next_norm` is the input norm of the next layer, or the final norm.

    None: this model has none.
    """

    qkv: Weight
    qkv_bias: torch.Tensor | None
    q_norm: torch.Tensor | None
    k_norm: torch.Tensor | None
    o: Weight
    post_norm: torch.Tensor
    gate_up: Weight
    down: Weight
    next_norm: torch.Tensor


class Llama:
    """`weights`: the `parameters` as `load_weights` gives them, tensors in the compute dtype or int8.

    `max_model_len` bounds the positions that can be asked for. One rank of `group` has the config, the
    weights and a cache of its part (see `engine.models.shard`); rank 0 alone gets whole logits.
    """

    def __init__(
        self,
        config: ModelConfig,
        weights: Mapping[str, Any],
        kernels: Kernels,
        max_model_len: int | None = None,
        group: Group | None = None,
    ) -> None:
        self.config = config
        self.kernels = kernels
        self._group = group
        self._embed = weights["embed"]
        self._lm_head = weights.get("lm_head", self._embed)
        self._first_norm = weights["layers.0.input_norm"]
        self.num_positions = max_model_len or config.max_position
        self._rope = rope_table(config, self.num_positions).to(self._first_norm.device)
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
        residual = kernels.embed(batch.token_ids, self._embed)
        x = kernels.rms_norm(residual, self._first_norm, eps)
        rows, last = batch.logits_rows, len(self._layers) - 1
        for i, layer in enumerate(self._layers):
            qkv = kernels.linear(x, layer.qkv, layer.qkv_bias)
            if layer.q_norm is not None and layer.k_norm is not None:
                kernels.head_norm(qkv, layer.q_norm, layer.k_norm, eps, cache.layout)
            kernels.rope_and_store(qkv, self._rope, batch, cache, i)
            if i == last and not len(rows):
                if self._group:
                    self._group.barrier()  # until every rank has stored K and V
                return residual.new_empty((0, self.config.vocab_size), dtype=torch.float32)
            x = kernels.attention(qkv, cache, i, plan)
            if i == last:
                # Past the last K and V, only rows whose logits are wanted matter.
                x, residual = x[rows], residual[rows]
            x = self._summed(kernels.linear(x, layer.o))
            x = kernels.add_rms_norm(x, residual, layer.post_norm, eps)
            x = kernels.linear(kernels.silu_mul(kernels.linear(x, layer.gate_up)), layer.down)
            x = kernels.add_rms_norm(self._summed(x), residual, layer.next_norm, eps)
        logits = kernels.logits(x, self._lm_head)
        return self._group.join(logits, self.config.vocab_size) if self._group else logits

    def _summed(self, part: torch.Tensor) -> torch.Tensor:
        return self._group.all_reduce(part) if self._group else part


def _layer(weights: Mapping[str, Any], i: int, num_layers: int) -> _Layer:
    own = {
        name.removeprefix(f"layers.{i}."): w for name, w in weights.items() if name.startswith(f"layers.{i}.")
    }
    next_norm = weights["final_norm" if i == num_layers - 1 else f"layers.{i + 1}.input_norm"]
    return _Layer(
        qkv=own["qkv"],
        qkv_bias=own.get("qkv_bias"),
        q_norm=own.get("q_norm"),
        k_norm=own.get("k_norm"),
        o=own["o"],
        post_norm=own["post_norm"],
        gate_up=own["gate_up"],
        down=own["down"],
        next_norm=next_norm,
    )


def _layer_parameters(config: ModelConfig, i: int) -> list[Parameter]:
    hidden, inner = config.hidden_size, config.intermediate_size
    q, kv = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    ours, theirs = f"layers.{i}.", f"model.layers.{i}."
    qkv = {"q_proj": q, "k_proj": kv, "v_proj": kv}

    def single(name: str, source: str, *shape: int, split: Split = Split.NONE) -> Parameter:
        return Parameter.single(ours + name, theirs + source, *shape, split=split)

    def fused(name: str, module: str, rows: Mapping[str, int], kind: str, *columns: int) -> Parameter:
        sources = tuple(f"{theirs}{module}.{part}.{kind}" for part in rows)
        shape, source_rows = (sum(rows.values()), *columns), tuple(rows.values())
        return Parameter(ours + name, shape, sources, source_rows, Split.ROWS)

    found = [
        single("input_norm", "input_layernorm.weight", hidden),
        fused("qkv", "self_attn", qkv, "weight", hidden),
        single("o", "self_attn.o_proj.weight", hidden, q, split=Split.COLUMNS),
        single("post_norm", "post_attention_layernorm.weight", hidden),
        fused("gate_up", "mlp", {"gate_proj": inner, "up_proj": inner}, "weight", hidden),
        single("down", "mlp.down_proj.weight", hidden, inner, split=Split.COLUMNS),
    ]
    if config.qkv_bias:
        found.append(fused("qkv_bias", "self_attn", qkv, "bias"))
    if config.head_norm:
        found.append(single("q_norm", "self_attn.q_norm.weight", config.head_dim))
        found.append(single("k_norm", "self_attn.k_norm.weight", config.head_dim))
    return found
