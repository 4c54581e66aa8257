"""ModelConfig from a Hugging Face `config.json` (and `generation_config.json`)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from checkpoint.config import ModelConfig, RopeScaling
from core.errors import ConfigError

ARCHITECTURES = {"LlamaForCausalLM": "llama"}
_REQUIRED = (
    *("vocab_size", "hidden_size", "intermediate_size"),
    *("num_hidden_layers", "num_attention_heads"),
)
# Options that change the maths. Any other value than the one here would be answered with nonsense.
_FIXED = {
    "hidden_act": "silu",
    "attention_bias": False,
    "mlp_bias": False,
    "partial_rotary_factor": 1.0,
    "quantization_config": None,
    "sliding_window": None,
}


def config_from_hf(
    config: Mapping[str, Any], generation: Mapping[str, Any], tokenizer_eos: Iterable[int]
) -> ModelConfig:
    """Read the geometry; `generation` may be empty, `tokenizer_eos` are the tokenizer's own EOS ids.

    Absent keys have transformers' defaults for Llama. Raises ConfigError for what is not supported.
    """
    architecture = _architecture(config)
    missing = [key for key in _REQUIRED if not isinstance(config.get(key), int)]
    if missing:
        raise ConfigError(f"config.json does not say {', '.join(missing)}; get the model's files again")
    for key, only in _FIXED.items():
        value = config.get(key)
        if value is not None and value != only:
            raise ConfigError(
                f"config.json has {key} = {value!r}, only {only!r} is supported; choose another model"
            )
    hidden, heads = int(config["hidden_size"]), int(config["num_attention_heads"])
    theta, scaling = _rope(config)
    return ModelConfig(
        architecture=architecture,
        vocab_size=int(config["vocab_size"]),
        hidden_size=hidden,
        intermediate_size=int(config["intermediate_size"]),
        num_layers=int(config["num_hidden_layers"]),
        num_heads=heads,
        num_kv_heads=int(config.get("num_key_value_heads") or heads),
        head_dim=int(config.get("head_dim") or hidden // max(heads, 1)),
        rms_norm_eps=float(config.get("rms_norm_eps", 1e-6)),
        rope_theta=theta,
        rope_scaling=scaling,
        max_position=int(config.get("max_position_embeddings", 2048)),
        tie_word_embeddings=bool(config.get("tie_word_embeddings", False)),
        bos_token_id=_first(config.get("bos_token_id")),
        eos_token_ids=_ids(config.get("eos_token_id"))
        | _ids(generation.get("eos_token_id"))
        | frozenset(tokenizer_eos),
    )


def _architecture(config: Mapping[str, Any]) -> str:
    names = config.get("architectures") or []
    for name in names:
        if name in ARCHITECTURES:
            return ARCHITECTURES[name]
    found = ", ".join(map(str, names)) or f"model_type {config.get('model_type')!r}"
    raise ConfigError(
        f"the model's architecture is {found}, which is not supported; "
        f"choose a model of the Llama family ({', '.join(ARCHITECTURES)})"
    )


def _rope(config: Mapping[str, Any]) -> tuple[float, RopeScaling | None]:
    """Base and scaling, from `rope_theta` + `rope_scaling` or the newer `rope_parameters`."""
    rope = dict(config.get("rope_scaling") or {}) | dict(config.get("rope_parameters") or {})
    theta = float(rope.get("rope_theta") or config.get("rope_theta") or 10000.0)
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind == "default":
        return theta, None
    try:
        if kind == "linear":
            return theta, RopeScaling("linear", float(rope["factor"]))
        if kind == "llama3":
            return theta, RopeScaling(
                "llama3",
                float(rope["factor"]),
                float(rope["low_freq_factor"]),
                float(rope["high_freq_factor"]),
                int(rope["original_max_position_embeddings"]),
            )
    except KeyError as missing:
        raise ConfigError(
            f"config.json's rope scaling of type {kind!r} lacks {missing}; get the model's files again"
        ) from None
    raise ConfigError(
        f"the model's rope type is {kind!r}, which is not supported; "
        f"choose a checkpoint with one of default, linear, llama3"
    )


def _ids(value: int | list[int] | None) -> frozenset[int]:
    """An id field is absent, one id, or a list of them."""
    if value is None:
        return frozenset()
    return frozenset(value) if isinstance(value, list) else frozenset({value})


def _first(value: int | list[int] | None) -> int | None:
    return (value[0] if value else None) if isinstance(value, list) else value
