"""Rotary position tables (Su et al. 2021) and the ways to stretch them beyond the trained context."""

from __future__ import annotations

import math

import torch

from checkpoint.config import ModelConfig, RopeScaling


def rope_table(config: ModelConfig, num_positions: int) -> torch.Tensor:
    """fp32 [num_positions, 2, head_dim / 2]: cosines, then sines, of position * frequency."""
    frequencies = rope_frequencies(config)
    angles = torch.outer(torch.arange(num_positions, dtype=torch.float32), frequencies)
    return torch.stack((angles.cos(), angles.sin()), dim=1)


def rope_frequencies(config: ModelConfig) -> torch.Tensor:
    """fp32 [head_dim / 2], radians a token: theta ** (-2i / head_dim), scaled as the model says."""
    exponents = torch.arange(0, config.head_dim, 2, dtype=torch.float32) / config.head_dim
    frequencies = 1.0 / config.rope_theta**exponents
    scaling = config.rope_scaling
    if scaling is None:
        return frequencies
    if scaling.kind == "linear":
        return frequencies / scaling.factor
    return _llama3(frequencies, scaling)


def _llama3(frequencies: torch.Tensor, scaling: RopeScaling) -> torch.Tensor:
    """Long wavelengths are slowed by `factor`, short ones kept, those between blended."""
    turns = scaling.original_max_position * frequencies / (2 * math.pi)
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    kept = ((turns - low) / (high - low)).clamp(0.0, 1.0)
    return frequencies * (kept + (1.0 - kept) / scaling.factor)
