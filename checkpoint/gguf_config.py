"""ModelConfig from GGUF metadata (`llama.*`, `qwen2.*`, `qwen3.*`, `tokenizer.ggml.*`)."""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping
from typing import Any

from checkpoint.config import ModelConfig, RopeScaling
from checkpoint.gguf_file import GGUFFile
from core.errors import ConfigError

ARCHITECTURES = ("llama", "qwen2", "qwen3")
"""Mistral's files say llama."""

ROPE_FACTORS = "rope_freqs.weight"
"""fp32 [head_dim/2]: what llama3 scaling divides each frequency by. GGUF stores no parameters of it."""

_EOS_KEYS = ("eos_token_id", "eot_token_id", "eom_token_id")
_EOS_LITERALS = {
    "llama-bpe": ("<|end_of_text|>", "<|eom_id|>", "<|eot_id|>"),
    "qwen2": ("<|endoftext|>", "<|im_end|>"),
}


def config_from_gguf(file: GGUFFile) -> ModelConfig:
    """Read the geometry. Raises ConfigError for what is missing or not supported."""
    meta = file.metadata
    architecture = meta.get("general.architecture")
    if architecture not in ARCHITECTURES:
        raise ConfigError(
            f"{file.path} has architecture {architecture!r}, which is not supported; "
            f"choose a model of the Llama family ({', '.join(ARCHITECTURES)})"
        )
    keys = _Keys(file, architecture)
    if meta.get("split.count", 1) > 1:
        raise ConfigError(f"{file.path} is one part of several; merge the parts with gguf-split first")
    # A window of Qwen's covers some layers only, and the file does not say which.
    unsupported = ("expert_count", "attention.sliding_window_pattern")
    for key in unsupported if architecture == "llama" else (*unsupported, "attention.sliding_window"):
        if keys.get(key, 0):
            raise ConfigError(
                f"{file.path} has {architecture}.{key} set, which is not supported; choose another"
            )
    hidden, heads = keys.integer("embedding_length"), keys.integer("attention.head_count")
    head_dim = keys.integer("attention.key_length", hidden // max(heads, 1))
    for key in ("rope.dimension_count", "attention.value_length"):
        if keys.get(key, head_dim) != head_dim:
            raise ConfigError(
                f"{file.path} has {architecture}.{key} = {keys.get(key, 0)}, only the head dimension "
                f"{head_dim} is supported; choose another model"
            )
    theta = _decimal(keys.get("rope.freq_base", 10000.0))
    max_position = keys.integer("context_length")
    scaling = _rope_scaling(keys, theta, head_dim, max_position)
    return ModelConfig(
        architecture=architecture,
        vocab_size=keys.integer("vocab_size", len(meta.get("tokenizer.ggml.tokens", ()))),
        hidden_size=hidden,
        intermediate_size=keys.integer("feed_forward_length"),
        num_layers=keys.integer("block_count"),
        num_heads=heads,
        num_kv_heads=keys.integer("attention.head_count_kv", heads),
        head_dim=head_dim,
        rms_norm_eps=_decimal(keys.get("attention.layer_norm_rms_epsilon", 1e-5)),
        rope_theta=theta,
        rope_scaling=scaling,
        max_position=scaling.reach(max_position) if scaling else max_position,
        tie_word_embeddings=all(tensor.name != "output.weight" for tensor in file.tensors),
        bos_token_id=meta.get("tokenizer.ggml.bos_token_id"),
        eos_token_ids=eos_token_ids(meta),
        sliding_window=keys.integer("attention.sliding_window", 0),
        qkv_bias=architecture == "qwen2",
        head_norm=architecture == "qwen3",
    )


def eos_token_ids(metadata: Mapping[str, Any]) -> frozenset[int]:
    """Ids that end an answer: end of sequence, of turn, of message.

    The format has one id of each kind; where a family's generation_config.json lists more, they are
    known by the pre-tokenizer's tag and the tokens' names.
    """
    keys = (f"tokenizer.ggml.{key}" for key in _EOS_KEYS)
    tokens: list[str] = metadata.get("tokenizer.ggml.tokens", [])
    literals = _EOS_LITERALS.get(metadata.get("tokenizer.ggml.pre", ""), ())
    by_name = (tokens.index(literal) for literal in literals if literal in tokens)
    return frozenset(metadata[key] for key in keys if key in metadata) | frozenset(by_name)


class _Keys:
    """The metadata under one architecture's prefix."""

    def __init__(self, file: GGUFFile, prefix: str) -> None:
        self.file, self._prefix = file, prefix

    def get(self, key: str, default: Any) -> Any:
        return self.file.metadata.get(f"{self._prefix}.{key}", default)

    def integer(self, key: str, default: int | None = None) -> int:
        value = self.get(key, default)
        if not isinstance(value, int):
            raise ConfigError(
                f"{self.file.path} has {self._prefix}.{key} = {value!r}, one number is needed; "
                f"convert the model again"
            )
        return value


def _decimal(value: float) -> float:
    """The decimal number a float32 was made from (9.999999747e-06 -> 1e-05), as config.json has it."""
    return float(f"{value:.7g}")


def _rope_scaling(keys: _Keys, theta: float, head_dim: int, max_position: int) -> RopeScaling | None:
    kind = keys.get("rope.scaling.type", "none")
    factor = _decimal(keys.get("rope.scaling.factor", keys.get("rope.scale_linear", 1.0)))
    if kind not in ("none", "linear", "yarn"):
        raise ConfigError(
            f"{keys.file.path} has rope type {kind!r}, which is not supported; "
            f"choose a model with one of none, linear, llama3, yarn"
        )
    if kind == "yarn":
        return _yarn(keys, factor, max_position)
    factors = next((tensor for tensor in keys.file.tensors if tensor.name == ROPE_FACTORS), None)
    if factors is None:
        return None if factor in (0.0, 1.0) else RopeScaling("linear", factor)
    if factors.ggml_type != 0 or factors.shape != (head_dim // 2,):
        raise ConfigError(
            f"{keys.file.path}: {ROPE_FACTORS} is not fp32 [{head_dim // 2}]; convert the model again"
        )
    divisors = struct.unpack(f"<{head_dim // 2}f", keys.file.tensor_bytes(factors))
    return _llama3_scaling(keys, theta, divisors)


def _yarn(keys: _Keys, factor: float, max_position: int) -> RopeScaling:
    for key in ("attn_factor", "yarn_attn_factor", "yarn_ext_factor"):
        if keys.get(f"rope.scaling.{key}", 1.0) != 1.0:
            raise ConfigError(
                f"{keys.file.path} has yarn rope scaling with its own {key}, which is not supported; "
                f"use the Hugging Face directory of this model"
            )
    return RopeScaling.yarn(
        factor,
        keys.integer("rope.scaling.original_context_length", max_position),
        _decimal(keys.get("rope.scaling.yarn_beta_fast", 32.0)),
        _decimal(keys.get("rope.scaling.yarn_beta_slow", 1.0)),
    )


def _llama3_scaling(keys: _Keys, theta: float, divisors: tuple[float, ...]) -> RopeScaling:
    """Recover the parameters from the divisors they were expanded to, and prove them."""
    scaling = RopeScaling("llama3", factor=_decimal(max(divisors)))
    for divisor, expected in zip(divisors, llama3_divisors(scaling, theta, 2 * len(divisors)), strict=True):
        if not math.isclose(divisor, expected, rel_tol=1e-3):
            raise ConfigError(
                f"{keys.file.path}: {ROPE_FACTORS} is not llama3 scaling with its usual parameters; "
                f"use the Hugging Face directory of this model, which names its own"
            )
    return scaling


def llama3_divisors(scaling: RopeScaling, theta: float, head_dim: int) -> list[float]:
    """What llama3 scaling divides each of the `head_dim / 2` rotary frequencies by."""
    divisors = []
    for pair in range(head_dim // 2):
        wavelength = 2 * math.pi * theta ** (2 * pair / head_dim)
        turns = scaling.original_max_position / wavelength
        low, high = scaling.low_freq_factor, scaling.high_freq_factor
        smooth = min(1.0, max(0.0, (turns - low) / (high - low)))
        divisors.append(1 / ((1 - smooth) / scaling.factor + smooth))
    return divisors
