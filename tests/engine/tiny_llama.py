"""A random Llama of a few thousand parameters, and batches for kernels, for the tests of the numeric half."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch

from checkpoint.checkpoint import RawTensor
from checkpoint.config import ModelConfig, RopeScaling
from checkpoint.parameters import expected_tensors
from core.blocks import num_blocks_for
from core.kv import KVLayout
from engine.batch import Batch, Chunk
from engine.kernels.interface import Kernels
from engine.kv_cache import KVCache
from engine.models.llama import Llama
from engine.models.weights import load_weights
from engine.runner import ModelRunner


def tiny_config(
    num_heads: int = 4,
    num_kv_heads: int = 2,
    tie: bool = True,
    rope_scaling: RopeScaling | None = None,
    architecture: str = "llama",
) -> ModelConfig:
    return ModelConfig(
        architecture=architecture,
        vocab_size=97,
        hidden_size=64,
        intermediate_size=96,
        num_layers=3,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=32,
        rms_norm_eps=1e-5,
        rope_theta=10000.0,
        rope_scaling=rope_scaling,
        max_position=512,
        tie_word_embeddings=tie,
        bos_token_id=None,
        eos_token_ids=frozenset({0}),
    )


class TinyCheckpoint:
    """Random weights in Hugging Face's names; `drop` and `twice` damage it by one tensor."""

    def __init__(self, config: ModelConfig, seed: int = 0, drop: str = "", twice: str = "") -> None:
        self.config, self.drop, self.twice = config, drop, twice
        self.path, self.name, self.tokenizer_digest = Path("tiny"), "tiny", ""
        generator = torch.Generator().manual_seed(seed)
        self.weights = {
            name: torch.randn(shape, generator=generator) * (0.3 if len(shape) > 1 else 1.0)
            for name, shape in expected_tensors(config).items()
        }
        self.conversions = 0

    def weights_digest(self) -> str:
        return hashlib.sha256(b"".join(w.numpy().tobytes() for w in self.weights.values())).hexdigest()

    def tensors(self) -> Iterator[RawTensor]:
        self.conversions += 1
        for name, tensor in self.weights.items():
            for _ in range((name != self.drop) + (name == self.twice)):
                yield RawTensor(name, "fp32", tuple(tensor.shape), memoryview(tensor.numpy()).cast("B"))

    def load_tokenizer(self):
        raise NotImplementedError("the numeric half reads no text")


def layout_of(config: ModelConfig, block_size: int = 16, kv_dtype: str = "fp32") -> KVLayout:
    return KVLayout(config.num_layers, config.num_kv_heads, config.head_dim, block_size, kv_dtype)


def tiny_runner(
    kernels: Kernels,
    cache_dir: Path,
    config: ModelConfig | None = None,
    block_size: int = 16,
    dtype: str = "fp32",
    kv_dtype: str = "fp32",
) -> ModelRunner:
    """A runner with room for 2048 tokens, every slot poisoned."""
    config = config or tiny_config()
    weights = load_weights(TinyCheckpoint(config), dtype, cache_dir)
    cache = KVCache(layout_of(config, block_size, kv_dtype), 2048 // block_size)
    cache.raw.fill_(0xFF)  # NaN in every format
    return ModelRunner(Llama(config, weights, kernels), cache)


def scattered_tables(
    lengths: Sequence[int], block_size: int, num_blocks: int, seed: int = 0
) -> list[list[int]]:
    """Disjoint block tables in random order for sequences of these lengths."""
    free = list(range(num_blocks))
    random.Random(seed).shuffle(free)
    return [[free.pop() for _ in range(num_blocks_for(length, block_size))] for length in lengths]


def run_chunks(runner: ModelRunner, *chunks: Chunk) -> torch.Tensor:
    return runner.run(Batch.build(chunks, runner.cache.layout.block_size))


def dense_logits(
    checkpoint: TinyCheckpoint, token_ids: Sequence[int], frequencies: torch.Tensor
) -> torch.Tensor:
    """[len, vocab] by a decoder written straight from the checkpoint's tensors: no pages, no fused matrices."""
    config, n = checkpoint.config, len(token_ids)
    angles = torch.outer(torch.arange(n).float(), frequencies)
    x = checkpoint.weights["model.embed_tokens.weight"][list(token_ids)]
    for i in range(config.num_layers):
        w = {
            name.removeprefix(f"model.layers.{i}.").removesuffix(".weight"): tensor
            for name, tensor in checkpoint.weights.items()
            if name.startswith(f"model.layers.{i}.")
        }
        h = _dense_norm(x, w["input_layernorm"], config)
        q, k, v = (
            (h @ w[f"self_attn.{part}_proj"].T).view(n, -1, config.head_dim).transpose(0, 1) for part in "qkv"
        )
        group = config.num_heads // config.num_kv_heads
        q, k = _dense_rope(q, angles), _dense_rope(k, angles).repeat_interleave(group, 0)
        scores = q @ k.transpose(1, 2) / config.head_dim**0.5
        scores = scores.masked_fill(torch.ones(n, n).triu(1).bool(), float("-inf")).softmax(-1)
        mixed = (scores @ v.repeat_interleave(group, 0)).transpose(0, 1).reshape(n, -1)
        x = x + mixed @ w["self_attn.o_proj"].T
        h = _dense_norm(x, w["post_attention_layernorm"], config)
        gate, up = h @ w["mlp.gate_proj"].T, h @ w["mlp.up_proj"].T
        x = x + (torch.nn.functional.silu(gate) * up) @ w["mlp.down_proj"].T
    head = "model.embed_tokens.weight" if config.tie_word_embeddings else "lm_head.weight"
    return _dense_norm(x, checkpoint.weights["model.norm.weight"], config) @ checkpoint.weights[head].T


def _dense_norm(x: torch.Tensor, weight: torch.Tensor, config: ModelConfig) -> torch.Tensor:
    return torch.nn.functional.rms_norm(x, weight.shape, weight, config.rms_norm_eps)


def _dense_rope(x: torch.Tensor, angles: torch.Tensor) -> torch.Tensor:
    pairs = torch.complex(*x.chunk(2, dim=-1)) * torch.polar(torch.ones_like(angles), angles)
    return torch.cat((pairs.real, pairs.imag), dim=-1)
