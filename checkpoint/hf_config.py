"""ModelConfig from a Hugging Face `config.json` (and `generation_config.json`)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from checkpoint.config import ModelConfig, RopeScaling
from core.errors import ConfigError


@dataclass(frozen=True, slots=True)
class _Family:
    """What an architecture's name says that its config.json does not.

    `defaults` are transformers' for absent keys, where they are not Llama's.
    """

    architecture: str
    qkv_bias: bool = False
    head_norm: bool = False
    defaults: Mapping[str, Any] = field(default_factory=dict)


_QWEN = {
    "num_key_value_heads": 32,
    "max_position_embeddings": 32768,
    "sliding_window": 4096,
    "max_window_layers": 28,
}
# Mistral is Llama with a window over all layers, and GGUF calls it Llama too.
_MISTRAL = {
    "num_key_value_heads": 8,
    "max_position_embeddings": 131072,
    "sliding_window": 4096,
    "use_sliding_window": True,
    "max_window_layers": 0,
}
ARCHITECTURES = {
    "LlamaForCausalLM": _Family("llama"),
    "MistralForCausalLM": _Family("llama", defaults=_MISTRAL),
    "Qwen2ForCausalLM": _Family("qwen2", qkv_bias=True, defaults=_QWEN),
    "Qwen3ForCausalLM": _Family("qwen3", head_norm=True, defaults={**_QWEN, "head_dim": 128}),
}
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
}
_FIXED_ROPE = {"partial_rotary_factor": 1.0, "mscale": None, "mscale_all_dim": None, "truncate": True}


def config_from_hf(
    config: Mapping[str, Any], generation: Mapping[str, Any], tokenizer_eos: Iterable[int]
) -> ModelConfig:
    """Read the geometry; `generation` may be empty, `tokenizer_eos` are the tokenizer's own EOS ids.

    Absent keys have transformers' defaults. Raises ConfigError for what is not supported.
    """
    family = _family(config)
    config = {**family.defaults, **config}
    missing = [key for key in _REQUIRED if not isinstance(config.get(key), int)]
    if missing:
        raise ConfigError(f"config.json does not say {', '.join(missing)}; get the model's files again")
    _check_fixed(config, _FIXED, "config.json")
    hidden, heads = int(config["hidden_size"]), int(config["num_attention_heads"])
    max_position = int(config.get("max_position_embeddings", 2048))
    theta, scaling = _rope(config, max_position)
    return ModelConfig(
        architecture=family.architecture,
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
        max_position=scaling.reach(max_position) if scaling else max_position,
        tie_word_embeddings=bool(config.get("tie_word_embeddings", False)),
        bos_token_id=_first(config.get("bos_token_id")),
        eos_token_ids=_ids(config.get("eos_token_id"))
        | _ids(generation.get("eos_token_id"))
        | frozenset(tokenizer_eos),
        sliding_window=_sliding_window(config),
        qkv_bias=family.qkv_bias,
        head_norm=family.head_norm,
    )


def _family(config: Mapping[str, Any]) -> _Family:
    names = config.get("architectures") or []
    for name in names:
        if name in ARCHITECTURES:
            return ARCHITECTURES[name]
    found = ", ".join(map(str, names)) or f"model_type {config.get('model_type')!r}"
    raise ConfigError(
        f"the model's architecture is {found}, which is not supported; "
        f"choose a model of the Llama family ({', '.join(ARCHITECTURES)})"
    )


def _check_fixed(found: Mapping[str, Any], fixed: Mapping[str, Any], where: str) -> None:
    for key, only in fixed.items():
        value = found.get(key)
        if value is not None and value != only:
            raise ConfigError(
                f"{where} has {key} = {value!r}, only {only!r} is supported; choose another model"
            )


def _sliding_window(config: Mapping[str, Any]) -> int:
    """The window of all layers in tokens, 0 for none."""
    window, num_layers = config.get("sliding_window"), int(config["num_hidden_layers"])
    if not window or not config.get("use_sliding_window", False):
        return 0
    if config.get("layer_types"):
        num_full = sum(kind != "sliding_attention" for kind in config["layer_types"])
    else:
        num_full = min(int(config.get("max_window_layers", num_layers)), num_layers)
    if 0 < num_full < num_layers:
        raise ConfigError(
            f"config.json has a sliding window on {num_layers - num_full} of {num_layers} layers, only on "
            f"all or none is supported; choose another model"
        )
    return 0 if num_full else int(window)


def _rope(config: Mapping[str, Any], max_position: int) -> tuple[float, RopeScaling | None]:
    """Base and scaling, from `rope_theta` + `rope_scaling` or the newer `rope_parameters`."""
    rope = dict(config.get("rope_scaling") or {}) | dict(config.get("rope_parameters") or {})
    if any(isinstance(value, dict) for value in rope.values()):
        raise ConfigError(
            f"config.json has rope parameters for each of {', '.join(rope)}, only one set for all layers "
            f"is supported; choose another model"
        )
    _check_fixed(rope, _FIXED_ROPE, "config.json's rope scaling")
    theta = float(rope.get("rope_theta") or config.get("rope_theta") or 10000.0)
    kind = rope.get("rope_type", rope.get("type", "default"))
    try:
        return theta, _scaling(kind, rope, max_position)
    except KeyError as missing:
        raise ConfigError(
            f"config.json's rope scaling of type {kind!r} lacks {missing}; get the model's files again"
        ) from None


def _scaling(kind: str, rope: Mapping[str, Any], max_position: int) -> RopeScaling | None:
    match kind:
        case "default":
            return None
        case "linear":
            return RopeScaling("linear", float(rope["factor"]))
        case "llama3":
            return RopeScaling(
                "llama3",
                float(rope["factor"]),
                float(rope["low_freq_factor"]),
                float(rope["high_freq_factor"]),
                int(rope["original_max_position_embeddings"]),
            )
        case "yarn":
            return RopeScaling.yarn(
                float(rope["factor"]),
                int(rope.get("original_max_position_embeddings") or max_position),
                float(rope.get("beta_fast") or 32.0),
                float(rope.get("beta_slow") or 1.0),
                rope.get("attention_factor"),
            )
    raise ConfigError(
        f"the model's rope type is {kind!r}, which is not supported; "
        f"choose a checkpoint with one of default, linear, llama3, yarn"
    )


def _ids(value: int | list[int] | None) -> frozenset[int]:
    """An id field is absent, one id, or a list of them."""
    if value is None:
        return frozenset()
    return frozenset(value) if isinstance(value, list) else frozenset({value})


def _first(value: int | list[int] | None) -> int | None:
    return (value[0] if value else None) if isinstance(value, list) else value
