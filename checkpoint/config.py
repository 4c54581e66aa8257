"""A model's geometry, whatever file it came from."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from core.errors import ConfigError


@dataclass(frozen=True, slots=True)
class RopeScaling:
    """How rotary frequencies are stretched beyond the trained context.

    `linear` divides every frequency by `factor`. `llama3` divides those whose wavelength is longer
    than `original_max_position / low_freq_factor` tokens, keeps those shorter than
    `original_max_position / high_freq_factor`, and blends in between (Llama 3.1 model card).
    """

    kind: Literal["linear", "llama3"]
    factor: float
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position: int = 8192

    def __post_init__(self) -> None:
        if self.factor <= 0:
            raise ConfigError(f"rope scaling factor {self.factor:g} is not positive; fix the model's config")
        if self.kind == "llama3" and not 0 < self.low_freq_factor < self.high_freq_factor:
            raise ConfigError(
                f"llama3 rope scaling needs 0 < low_freq_factor < high_freq_factor, the model has "
                f"{self.low_freq_factor:g} and {self.high_freq_factor:g}; fix its config"
            )

    @property
    def description(self) -> str:
        if self.kind == "linear":
            return f"linear:{self.factor:g}"
        numbers = (self.factor, self.low_freq_factor, self.high_freq_factor, self.original_max_position)
        return "llama3:" + ":".join(f"{number:.10g}" for number in numbers)


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Geometry of a decoder of the Llama family.

    `max_position` is the context length in tokens. `eos_token_ids` is the one place that knows every
    end-of-sequence id: the union of the tokenizer's, the config's and the generation config's.
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    rope_theta: float
    rope_scaling: RopeScaling | None
    max_position: int
    tie_word_embeddings: bool
    bos_token_id: int | None
    eos_token_ids: frozenset[int]

    def __post_init__(self) -> None:
        for name in (
            *("vocab_size", "hidden_size", "intermediate_size", "num_layers", "num_heads"),
            *("num_kv_heads", "head_dim", "rms_norm_eps", "rope_theta", "max_position"),
        ):
            if getattr(self, name) <= 0:
                raise ConfigError(
                    f"the model's {name} is {getattr(self, name)}, which cannot be; fix its config"
                )
        if self.num_heads % self.num_kv_heads:
            raise ConfigError(
                f"{self.num_heads} attention heads cannot share {self.num_kv_heads} KV heads evenly; "
                f"fix the model's config"
            )
        if self.head_dim % 2:
            raise ConfigError(f"head_dim {self.head_dim} is odd, rotary needs pairs; fix the model's config")

    @property
    def rope_description(self) -> str:
        """For the fingerprint, e.g. `default/100000` or `llama3:8:1:4:8192/500000`."""
        scaling = self.rope_scaling.description if self.rope_scaling else "default"
        return f"{scaling}/{self.rope_theta:.10g}"
