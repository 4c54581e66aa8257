"""Each tensor-parallel rank's part of a model: whole heads, and as many of the MLP's units.

qkv       rows of the rank's q, k and v heads      o         the columns that these heads feed
gate_up   rows of the rank's gates and ups         down      the columns that these units feed
lm_head   rows of the rank's part of the vocabulary; the last ranks may have fewer
rest      whole, in every rank
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch

from checkpoint.config import ModelConfig
from core.errors import ConfigError
from engine.models.llama import Llama
from engine.models.parameter import Parameter, Split


def rank_config(config: ModelConfig, degree: int) -> ModelConfig:
    """The geometry of each of `degree` ranks. Raises ConfigError unless heads and units divide evenly."""
    counts = {
        "num_kv_heads": config.num_kv_heads,
        "num_heads": config.num_heads,
        "intermediate_size": config.intermediate_size,
    }
    if any(count % degree for count in counts.values()):
        fits = [t for t in range(1, config.num_kv_heads + 1) if not any(n % t for n in counts.values())]
        raise ConfigError(
            f"--tensor-parallel-size {degree}: {config.num_kv_heads} KV heads, {config.num_heads} heads and "
            f"{config.intermediate_size} MLP units of the model do not all divide by it; "
            f"choose one of {', '.join(map(str, fits))}"
        )
    return replace(config, **{name: count // degree for name, count in counts.items()})


def rank_weights(
    config: ModelConfig, weights: Mapping[str, torch.Tensor], degree: int, rank: int
) -> dict[str, torch.Tensor]:
    """One rank's tensors of the whole model's `weights` (the `parameters` of `config`), all contiguous.

    Those that lie in one piece are views, the others copies.
    """
    found = {
        parameter.name: _part(parameter, weights[parameter.name], degree, rank)
        for parameter in Llama.parameters(config)
    }
    lm_head = weights["embed" if config.tie_word_embeddings else "lm_head"]
    each = -(-config.vocab_size // degree)
    found["lm_head"] = lm_head[rank * each : (rank + 1) * each]
    return found


def _part(parameter: Parameter, weight: torch.Tensor, degree: int, rank: int) -> torch.Tensor:
    match parameter.split:
        case Split.ROWS:
            parts = weight.split(parameter.source_rows)
            return torch.cat([part.chunk(degree)[rank] for part in parts])
        case Split.COLUMNS:
            return weight.chunk(degree, 1)[rank].contiguous()
        case _:
            return weight
