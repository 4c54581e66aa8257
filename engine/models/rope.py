"""Rotary position tables (Su et al. 2021) and the ways to stretch them beyond the trained context."""

from __future__ import annotations

import math

import torch

from checkpoint.config import ModelConfig, RopeScaling


def rope_table(config: ModelConfig, num_positions: int) -> torch.Tensor:
    """fp32 [num_positions, 2, head_dim / 2]: cosines, then sines, of position * frequency.

    Under yarn both are scaled by its attention factor.
    """
    frequencies = rope_frequencies(config)
    angles = torch.outer(torch.arange(num_positions, dtype=torch.float32), frequencies)
    table = torch.stack((angles.cos(), angles.sin()), dim=1)
    return table * config.rope_scaling.attention_factor if config.rope_scaling else table


def rope_frequencies(config: ModelConfig) -> torch.Tensor:
    """fp32 [head_dim / 2], radians a token: theta ** (-2i / head_dim), scaled as the model says."""
    exponents = torch.arange(0, config.head_dim, 2, dtype=torch.float32) / config.head_dim
    frequencies = 1.0 / config.rope_theta**exponents
    scaling = config.rope_scaling
    if scaling is None:
        return frequencies
    if scaling.kind == "linear":
        return frequencies / scaling.factor
    if scaling.kind == "yarn":
        return _yarn(frequencies, scaling, config.rope_theta)
    return _llama3(frequencies, scaling)


def _llama3(frequencies: torch.Tensor, scaling: RopeScaling) -> torch.Tensor:
    """Long wavelengths are slowed by `factor`, short ones kept, those between blended."""
    turns = scaling.original_max_position * frequencies / (2 * math.pi)
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    kept = ((turns - low) / (high - low)).clamp(0.0, 1.0)
    return frequencies * (kept + (1.0 - kept) / scaling.factor)


def _yarn(frequencies: torch.Tensor, scaling: RopeScaling, theta: float) -> torch.Tensor:
    """Pairs that turn often are kept, slow ones slowed, in between on a ramp (Peng et al. 2023)."""
    num_pairs = frequencies.shape[0]

    def pair_with(turns: float) -> float:
        """The fractional index of the pair that turns so often within the trained context."""
        wavelength = scaling.original_max_position / turns
        return num_pairs * math.log(wavelength / (2 * math.pi)) / math.log(theta)

    first = max(math.floor(pair_with(scaling.beta_fast)), 0)
    last = min(math.ceil(pair_with(scaling.beta_slow)), 2 * num_pairs - 1)
    slowed = ((torch.arange(num_pairs) - first) / max(last - first, 0.001)).clamp(0.0, 1.0)
    return frequencies * ((1.0 - slowed) + slowed / scaling.factor)
