"""Each tensor-parallel rank's part of a model: whole heads, and as many of the MLP's units.

    qkv       rows of the rank's q, k and v heads      o         the columns that these heads feed
    gate_up   rows of the rank's gates and ups         down      the columns that these units feed
    lm_head   rows of the rank's part of the vocabulary; the last ranks may have fewer
    rest      whole, in every rank

A model says by `Parameter.split` which is which.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch

from checkpoint.config import ModelConfig
from core.errors import ConfigError
from engine.kernels import int8
from engine.kernels.int8 import QuantizedWeight, Weight
from engine.models.llama import Llama
from engine.models.parameter import Parameter, Split
from engine.parallel import vocabulary_share


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
    config: ModelConfig, weights: Mapping[str, Weight], degree: int, rank: int
) -> dict[str, Weight]:
    """One rank's part of the whole model's `weights` (the `parameters` of `config`), all contiguous.

    What lies in one piece is a view, the rest copies. Raises ConfigError for int8 weights whose panels a
    rank would have to cut.
    """
    try:
        found = {
            parameter.name: _part(parameter, weights[parameter.name], degree, rank)
            for parameter in Llama.parameters(config)
        }
    except ValueError as error:
        raise ConfigError(
            f"--tensor-parallel-size {degree} does not go with --quantization int8 for this model ({error}); "
            "use --quantization none, or another degree"
        ) from None
    lm_head = weights["embed" if config.tie_word_embeddings else "lm_head"]
    each = vocabulary_share(config.vocab_size, degree)
    first = rank * each
    found["lm_head"] = _rows(lm_head, first, max(first, min(first + each, config.vocab_size)))
    return found


def _part(parameter: Parameter, weight: Weight, degree: int, rank: int) -> Weight:
    match parameter.split:
        case Split.ROWS:
            pieces, first = [], 0
            for count in parameter.source_rows:
                each = count // degree
                pieces.append(_rows(weight, first + rank * each, first + (rank + 1) * each))
                first += count
            return int8.stack(pieces) if isinstance(weight, QuantizedWeight) else torch.cat(pieces)
        case Split.COLUMNS:
            each = weight.shape[1] // degree
            first, end = rank * each, (rank + 1) * each
            if isinstance(weight, QuantizedWeight):
                return int8.columns_of(weight, first, end)
            return weight[:, first:end].contiguous()
        case _:
            return weight


def _rows(weight: Weight, first: int, end: int) -> Weight:
    return int8.rows_of(weight, first, end) if isinstance(weight, QuantizedWeight) else weight[first:end]
