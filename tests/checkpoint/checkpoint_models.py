"""Tiny random models on disk, as a Hugging Face directory and as a GGUF file of the same weights."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import tokenizers
from tokenizers import AddedToken, decoders, models, pre_tokenizers, processors

from checkpoint.config import ModelConfig
from checkpoint.parameters import expected_tensors
from checkpoint.token_bytes import _byte_of

SPECIAL = ("<s>", "</s>", "<|im_start|>", "<|im_end|>")
MERGES = ("1 2", "12 3", "123 4", "h e", "l l", "he ll")
TOKENS = [*SPECIAL, *_byte_of(), *("".join(merge.split()) for merge in MERGES)]
CHATML = (
    "{{ bos_token }}{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\\n' + m['content'] + '<|im_end|>\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
SAFETENSORS_DTYPE = {"float32": "F32", "float16": "F16", "uint16": "BF16"}
_GGUF_LAYER = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def tiny_config(tied: bool = True, architecture: str = "llama") -> ModelConfig:
    return ModelConfig(
        architecture=architecture,
        vocab_size=len(TOKENS),
        hidden_size=32,
        intermediate_size=64,
        num_layers=2,
        num_heads=4,
        num_kv_heads=2,
        head_dim=8,
        rms_norm_eps=1e-5,
        rope_theta=10000.0,
        rope_scaling=None,
        max_position=128,
        tie_word_embeddings=tied,
        bos_token_id=0,
        eos_token_ids=frozenset({1}),
        qkv_bias=architecture == "qwen2",
        head_norm=architecture == "qwen3",
    )


def random_weights(config: ModelConfig) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(7)
    return {
        name: rng.standard_normal(shape).astype(np.float32)
        for name, shape in expected_tensors(config).items()
    }


def write_safetensors(path: Path, tensors: dict[str, np.ndarray]) -> None:
    header, chunks, position = {}, [], 0
    for name, array in tensors.items():
        data = array.tobytes()
        header[name] = {
            "dtype": SAFETENSORS_DTYPE[array.dtype.name],
            "shape": list(array.shape),
            "data_offsets": [position, position + len(data)],
        }
        chunks.append(data)
        position += len(data)
    encoded = json.dumps({"__metadata__": {"format": "pt"}, **header}).encode()
    path.write_bytes(struct.pack("<Q", len(encoded)) + encoded + b"".join(chunks))


def write_hf(
    path: Path,
    config: ModelConfig,
    weights: dict[str, np.ndarray],
    num_shards: int = 1,
    overrides: dict[str, Any] | None = None,
) -> Path:
    """A whole directory; `overrides` change config.json (None removes a key)."""
    path.mkdir(parents=True, exist_ok=True)
    content: dict[str, Any] = {
        "architectures": [f"{config.architecture.capitalize()}ForCausalLM"],
        "model_type": config.architecture,
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "rms_norm_eps": config.rms_norm_eps,
        "rope_theta": config.rope_theta,
        "max_position_embeddings": config.max_position,
        "tie_word_embeddings": config.tie_word_embeddings,
        "bos_token_id": 0,
        "eos_token_id": 1,
    } | (overrides or {})
    (path / "config.json").write_text(json.dumps(content))
    if num_shards == 1:
        write_safetensors(path / "model.safetensors", weights)
    else:
        _write_shards(path, weights, num_shards)
    byte_level_tokenizer().save(str(path / "tokenizer.json"))
    settings = {"bos_token": "<s>", "eos_token": {"content": "</s>"}, "chat_template": CHATML}
    (path / "tokenizer_config.json").write_text(json.dumps(settings))
    return path


def _write_shards(path: Path, weights: dict[str, np.ndarray], num_shards: int) -> None:
    index = {}
    for shard in range(num_shards):
        file = f"model-{shard + 1:05}-of-{num_shards:05}.safetensors"
        names = list(weights)[shard::num_shards]
        write_safetensors(path / file, {name: weights[name] for name in names})
        index |= dict.fromkeys(names, file)
    (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))


def byte_level_tokenizer() -> tokenizers.Tokenizer:
    """Byte-level BPE that puts `<s>` before a text."""
    vocab = {token: i for i, token in enumerate(TOKENS)}
    core = tokenizers.Tokenizer(models.BPE(vocab, [tuple(merge.split()) for merge in MERGES]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    core.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL])
    core.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    return core


def permute(rows: np.ndarray, num_heads: int) -> np.ndarray:
    """What a converter does to q and k of the llama architecture, row by row."""
    head_dim = rows.shape[0] // num_heads
    permuted = np.empty_like(rows)
    for head in range(num_heads):
        for pair in range(head_dim // 2):
            base = head * head_dim
            permuted[base + 2 * pair] = rows[base + pair]
            permuted[base + 2 * pair + 1] = rows[base + head_dim // 2 + pair]
    return permuted


def write_gguf(
    path: Path,
    config: ModelConfig,
    weights: dict[str, np.ndarray],
    *,
    architecture: str | None = None,
    pre: str = "gpt-2",
    tokenizer_model: str = "gpt2",
    quantize: gguf.GGMLQuantizationType | None = None,
    rope_factors: np.ndarray | None = None,
    metadata: dict[str, int | str] | None = None,
) -> Path:
    """`metadata` adds uint32 and string pairs; `quantize` is for all matrices."""
    writer = gguf.GGUFWriter(path, architecture or config.architecture)
    writer.add_block_count(config.num_layers)
    writer.add_context_length(config.max_position)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_heads)
    writer.add_head_count_kv(config.num_kv_heads)
    writer.add_rope_freq_base(config.rope_theta)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_tokenizer_model(tokenizer_model)
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(TOKENS)
    writer.add_token_types([3 if token in SPECIAL else 1 for token in TOKENS])
    writer.add_token_merges(list(MERGES))
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(1)
    writer.add_chat_template(CHATML)
    for key, value in (metadata or {}).items():
        writer.add_string(key, value) if isinstance(value, str) else writer.add_uint32(key, value)
    for name, array in weights.items():
        stored = _gguf_rows(name, array, config)
        if quantize is not None and stored.ndim == 2:
            raw = gguf.quants.quantize(stored, quantize)
            writer.add_tensor(gguf_name(name), raw, raw_dtype=quantize)
        else:
            writer.add_tensor(gguf_name(name), stored)
    if rope_factors is not None:
        writer.add_tensor("rope_freqs.weight", rope_factors.astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _gguf_rows(name: str, array: np.ndarray, config: ModelConfig) -> np.ndarray:
    if config.architecture != "llama":
        return array
    if "q_proj" in name:
        return permute(array, config.num_heads)
    return permute(array, config.num_kv_heads) if "k_proj" in name else array


def gguf_name(name: str) -> str:
    plain = {
        "model.embed_tokens.weight": "token_embd.weight",
        "model.norm.weight": "output_norm.weight",
        "lm_head.weight": "output.weight",
    }
    if not name.startswith("model.layers."):
        return plain.get(name, name)
    _, _, layer, rest = name.split(".", 3)
    module, _, kind = rest.rpartition(".")
    return f"blk.{layer}.{_GGUF_LAYER[module]}.{kind}"
