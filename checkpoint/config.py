"""A model's geometry, whatever file it came from."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from core.errors import ConfigError


@dataclass(frozen=True, slots=True)
class RopeScaling:
    """How rotary frequencies are stretched beyond the trained context.

    `linear` divides every frequency by `factor`. `llama3` divides those whose wavelength is longer
    than `original_max_position / low_freq_factor` tokens, keeps those shorter than
    `original_max_position / high_freq_factor`, and blends in between (Llama 3.1 model card). `yarn`
    keeps those that turn more than `beta_fast` times within `original_max_position` tokens, divides
    those that turn less than `beta_slow` times, and ramps in between; cosines and sines are multiplied
    by `attention_factor` (Peng et al. 2023).
    """

    kind: Literal["linear", "llama3", "yarn"]
    factor: float
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position: int = 8192
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float = 1.0

    @classmethod
    def yarn(
        cls,
        factor: float,
        original_max_position: int,
        beta_fast: float = 32.0,
        beta_slow: float = 1.0,
        attention_factor: float | None = None,
    ) -> RopeScaling:
        """YaRN; without an `attention_factor` it is the paper's 0.1 * ln(factor) + 1."""
        if attention_factor is None:
            attention_factor = 0.1 * math.log(factor) + 1.0 if factor > 1 else 1.0
        return cls(
            "yarn",
            factor,
            original_max_position=original_max_position,
            beta_fast=beta_fast,
            beta_slow=beta_slow,
            attention_factor=attention_factor,
        )

    def __post_init__(self) -> None:
        if self.factor <= 0:
            raise ConfigError(f"rope scaling factor {self.factor:g} is not positive; fix the model's config")
        if self.kind == "llama3" and not 0 < self.low_freq_factor < self.high_freq_factor:
            raise ConfigError(
                f"llama3 rope scaling needs 0 < low_freq_factor < high_freq_factor, the model has "
                f"{self.low_freq_factor:g} and {self.high_freq_factor:g}; fix its config"
            )
        if self.kind == "yarn" and not (
            0 < self.beta_slow < self.beta_fast and self.original_max_position > 0
        ):
            raise ConfigError(
                f"yarn rope scaling needs 0 < beta_slow < beta_fast and a trained context, the model has "
                f"{self.beta_slow:g}, {self.beta_fast:g} and {self.original_max_position}; fix its config"
            )

    @property
    def description(self) -> str:
        numbers: tuple[float, ...] = (self.factor,)
        if self.kind == "llama3":
            numbers += (self.low_freq_factor, self.high_freq_factor, self.original_max_position)
        if self.kind == "yarn":
            numbers += (self.beta_fast, self.beta_slow, self.original_max_position, self.attention_factor)
        return f"{self.kind}:" + ":".join(f"{number:.10g}" for number in numbers)

    def reach(self, max_position: int) -> int:
        """Context in tokens: yarn is often added to a config whose own number is still the trained one."""
        if self.kind != "yarn":
            return max_position
        return max(max_position, round(self.factor * self.original_max_position))


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Geometry of a decoder of the Llama family: Llama, Mistral, Qwen2, Qwen3.

    `max_position` is the context length in tokens. `eos_token_ids` is the one place that knows every
    end-of-sequence id: the union of the tokenizer's, the config's and the generation config's.
    `sliding_window`: a token attends to itself and the `sliding_window - 1` before it, in every layer;
    0: to all before it. `qkv_bias`: the q, k and v projections have a bias. `head_norm`: each head of
    q and k is RMS-normalised before it is rotated.
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
    sliding_window: int = 0
    qkv_bias: bool = False
    head_norm: bool = False

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
        if self.sliding_window < 0:
            raise ConfigError(
                f"the model's sliding_window is {self.sliding_window}, which cannot be; fix its config"
            )
        if self.head_dim % 2:
            raise ConfigError(f"head_dim {self.head_dim} is odd, rotary needs pairs; fix the model's config")

    @property
    def rope_description(self) -> str:
        """How positions enter attention, for the fingerprint: scaling, base and window.

        E.g. `default/100000`, `llama3:8:1:4:8192/500000` or `default/10000/window:4096`.
        """
        scaling = self.rope_scaling.description if self.rope_scaling else "default"
        window = f"/window:{self.sliding_window}" if self.sliding_window else ""
        return f"{scaling}/{self.rope_theta:.10g}{window}"
