"""Which parameters a model has, and the check that a checkpoint holds exactly those."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from checkpoint.config import ModelConfig
from core.errors import ConfigError

EMBEDDING, FINAL_NORM, LM_HEAD = "model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"
_LISTED = 5


def expected_tensors(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Every parameter by its Hugging Face name, with its shape (linear weights are [out, in]).

    A tied model has no `lm_head.weight`: its LM head is the embedding.
    """
    hidden, inner = config.hidden_size, config.intermediate_size
    q_rows, kv_rows = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    layer: dict[str, tuple[int, ...]] = {
        "input_layernorm.weight": (hidden,),
        "self_attn.q_proj.weight": (q_rows, hidden),
        "self_attn.k_proj.weight": (kv_rows, hidden),
        "self_attn.v_proj.weight": (kv_rows, hidden),
        "self_attn.o_proj.weight": (hidden, q_rows),
        "post_attention_layernorm.weight": (hidden,),
        "mlp.gate_proj.weight": (inner, hidden),
        "mlp.up_proj.weight": (inner, hidden),
        "mlp.down_proj.weight": (hidden, inner),
    }
    if config.qkv_bias:
        layer |= {
            "self_attn.q_proj.bias": (q_rows,),
            "self_attn.k_proj.bias": (kv_rows,),
            "self_attn.v_proj.bias": (kv_rows,),
        }
    if config.head_norm:
        layer |= {
            "self_attn.q_norm.weight": (config.head_dim,),
            "self_attn.k_norm.weight": (config.head_dim,),
        }
    tensors: dict[str, tuple[int, ...]] = {EMBEDDING: (config.vocab_size, hidden)}
    for index in range(config.num_layers):
        tensors |= {f"model.layers.{index}.{name}": shape for name, shape in layer.items()}
    tensors[FINAL_NORM] = (hidden,)
    if not config.tie_word_embeddings:
        tensors[LM_HEAD] = (config.vocab_size, hidden)
    return tensors


def verify_tensors(config: ModelConfig, found: Mapping[str, tuple[int, ...]], where: object) -> None:
    """Raise ConfigError unless `found` (name -> shape) is exactly the model's parameters.

    Allowed on top: an LM head that a tied model does not need, and rotary buffers of old exports.
    """
    expected = expected_tensors(config)
    missing = expected.keys() - found.keys()
    if missing == {LM_HEAD}:
        raise ConfigError(
            f"{where} has no {LM_HEAD} and does not tie it to the embedding; "
            f"get the missing tensor, or set tie_word_embeddings if the model was trained so"
        )
    if missing:
        raise ConfigError(f"{where} lacks {listing(missing)}; get the model's files again")
    extra = [name for name in found.keys() - expected.keys() if not _redundant(name)]
    if extra:
        raise ConfigError(
            f"{where} has parameters that this architecture does not: {listing(extra)}; "
            f"choose another checkpoint"
        )
    for name, shape in expected.items():
        if found[name] != shape:
            raise ConfigError(
                f"{where}: {name} has shape {list(found[name])}, the config asks for {list(shape)}; "
                f"config and weights are not of one model, get both again"
            )


def listing(names: Iterable[str]) -> str:
    """`a, b, c and 7 more`: names for a sentence, sorted and bounded."""
    ordered = sorted(names)
    more = len(ordered) - _LISTED
    return ", ".join(ordered[:_LISTED]) + (f" and {more} more" if more > 0 else "")


def _redundant(name: str) -> bool:
    return name == LM_HEAD or name.endswith(".rotary_emb.inv_freq")
