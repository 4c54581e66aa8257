"""A GGUF file of given Hugging Face tensors, named by the `gguf` package's own map of names."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from gguf import GGMLQuantizationType as Kind

K_BLOCK = 256
"""Numbers per block of the K types, and so what a row must be a multiple of."""


def write_gguf_twin(
    path: Path,
    config: Any,
    tensors: Mapping[str, np.ndarray],
    kind: Kind = Kind.F32,
    metadata: Mapping[str, int | float | str] | None = None,
) -> dict[str, np.ndarray]:
    """Write fp32 `tensors`, matrices as `kind`; returns what a reader must find, in Hugging Face's order.

    `config` has transformers' attributes. Types that the package cannot quantize to are filled with
    random blocks instead. `metadata` is below the architecture's prefix.
    """
    architecture = "llama" if config.model_type == "mistral" else config.model_type
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_vocab_size(config.vocab_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_bos_token_id(config.bos_token_id)
    writer.add_eos_token_id(config.eos_token_id)
    for key, value in (metadata or {}).items():
        add = {int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}[type(value)]
        add(f"{architecture}.{key}", value)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH[architecture.upper()], config.num_hidden_layers)
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    stored = {}
    for name, tensor in tensors.items():
        rows, stored[name] = _encode(tensor, kind if tensor.ndim == 2 else Kind.F32)
        for projection, num_heads in heads.items():
            if architecture == "llama" and projection in name:
                rows = _permute(rows, num_heads)
        gguf_name = names.get_name(name, (".weight", ".bias"))
        assert gguf_name is not None
        writer.add_tensor(gguf_name, rows, raw_dtype=kind if tensor.ndim == 2 else Kind.F32)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return stored


def _encode(tensor: np.ndarray, kind: Kind) -> tuple[np.ndarray, np.ndarray]:
    """(rows as stored, the fp32 numbers that they stand for)"""
    if kind in (Kind.Q4_K, Kind.Q6_K):
        rows = _random_k_blocks(tensor.shape, kind)
    else:
        rows = gguf.quants.quantize(tensor, kind)
    return rows, gguf.quants.dequantize(rows, kind)


def _random_k_blocks(shape: tuple[int, ...], kind: Kind) -> np.ndarray:
    """Random codes under scales that keep the numbers near 0.2."""
    rng = np.random.default_rng(sum(shape))
    nbytes = gguf.GGML_QUANT_SIZES[kind][1]
    blocks = rng.integers(0, 256, (shape[0], shape[1] // K_BLOCK, nbytes), dtype=np.uint8)
    if kind is Kind.Q4_K:  # two fp16 scales lead the block
        blocks[..., :4] = np.array([3e-4, 2e-3], np.float16).view(np.uint8)
    else:  # one ends it
        blocks[..., -2:] = np.array([6e-5], np.float16).view(np.uint8)
    return blocks.reshape(shape[0], -1)


def _permute(rows: np.ndarray, num_heads: int) -> np.ndarray:
    """Put the two rows of a head that rotary turns together beside one another, as converters for llama do."""
    head_dim = rows.shape[0] // num_heads
    order = [
        head * head_dim + half * head_dim // 2 + pair
        for head in range(num_heads)
        for pair in range(head_dim // 2)
        for half in range(2)
    ]
    return rows[order]
