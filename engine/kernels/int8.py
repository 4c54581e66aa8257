"""Int8 weights: what they are, how they lie in memory, and the torch twin of products with them.

A weight has one scale a row (output channel), a row of activations one for every GROUP numbers, all
symmetric: number = integer * scale, integers -127 .. 127. A group's sum of products is an exact integer
and groups are added in order, so a row's result is the same bit for bit whatever else is in the batch,
and the same in every kernel set.

One scale for a whole row of activations would cost 5% of perplexity (`benchmarks/quality.py`): a few
channels of the residual stream are 20 times as large as the rest, which then keep 3 of their 8 bits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

LEVELS = 127.0
PANEL = 32
"""Rows of a weight that lie together, as in cpu/linear_int8.c."""

GROUP = 64
"""Neighbouring numbers of a row of activations that share a scale, as in cpu/linear_int8.c."""

_OFFSET = 128
"""Stored bytes are integer + 128: the CPU's dot products take one side unsigned."""

_SMALLEST = 1e-30
"""What has no number above it counts as zeros: 127 divided by less could overflow."""


@dataclass(frozen=True, slots=True)
class QuantizedWeight:
    """A matrix [out, in] in int8; stands where a tensor would in `Kernels.linear`, `logits` and `embed`.

    `packed`: uint8 [panels, in / 4, PANEL, 4]; `scales`: fp32 [panels * PANEL]; `shape`: (out, in);
    `dtype`: the compute dtype of the model, which rows of an embedding are given in.
    """

    packed: torch.Tensor
    scales: torch.Tensor
    shape: tuple[int, int]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        return self.packed.nbytes + self.scales.nbytes


Weight = torch.Tensor | QuantizedWeight


def packed_shape(shape: tuple[int, ...]) -> tuple[int, int, int, int]:
    """Of `QuantizedWeight.packed`; rows are filled up to whole panels."""
    out, width = shape
    return (-(-out // PANEL), width // 4, PANEL, 4)


def unsupported(shape: tuple[int, ...]) -> str:
    """Why a matrix [out, in] cannot be int8, as a phrase; empty when it can."""
    return f"its width {shape[1]} is no multiple of 4" if shape[1] % 4 else ""


def pack(rows: torch.Tensor, first: int, packed: torch.Tensor, scales: torch.Tensor) -> None:
    """Quantize `rows` [n, in] into rows `first` .. of a weight's tensors (see QuantizedWeight)."""
    numbers, row_scales = quantize(rows)
    at = torch.arange(first, first + rows.shape[0])
    fours = (numbers.view(torch.uint8) ^ _OFFSET).view(torch.int32)
    packed.view(torch.int32)[at // PANEL, :, at % PANEL, 0] = fours
    scales[at] = row_scales


def rows_of(weight: QuantizedWeight, first: int, end: int) -> QuantizedWeight:
    """Rows `first` .. `end` - 1 over the same memory. Raises ValueError when `first` is within a panel."""
    if first % PANEL:
        raise ValueError(f"row {first} does not begin a panel of {PANEL}")
    panels = slice(first // PANEL, -(-end // PANEL))
    scales = weight.scales[panels.start * PANEL : panels.stop * PANEL]
    return replace(weight, packed=weight.packed[panels], scales=scales, shape=(end - first, weight.shape[1]))


def columns_of(weight: QuantizedWeight, first: int, end: int) -> QuantizedWeight:
    """A copy of columns `first` .. `end` - 1, both multiples of 4; with the scales of the whole rows."""
    packed = weight.packed[:, first // 4 : end // 4].contiguous()
    return replace(weight, packed=packed, shape=(weight.shape[0], end - first))


def stack(parts: Sequence[QuantizedWeight]) -> QuantizedWeight:
    """A copy of their rows, one part after the other. Raises ValueError unless all have whole panels."""
    if any(part.shape[0] % PANEL for part in parts):
        raise ValueError(f"parts of {[part.shape[0] for part in parts]} rows are no whole panels of {PANEL}")
    packed, scales = (torch.cat(each) for each in zip(*((p.packed, p.scales) for p in parts), strict=True))
    shape = (sum(part.shape[0] for part in parts), parts[0].shape[1])
    return replace(parts[0], packed=packed, scales=scales, shape=shape)


def quantize(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """int8 like x, and fp32 scales, one for the last dim.

    Where that has NaN or an infinity, so has its scale.
    """
    wide = x.float()
    highest = wide.abs().amax(-1)
    # `LEVELS / highest` would be a reciprocal times LEVELS in torch, with other roundings than in C.
    inverse = torch.where(highest > _SMALLEST, torch.full_like(highest, LEVELS) / highest, 0.0)
    numbers = (wide * inverse[..., None]).round().nan_to_num(0.0)
    return numbers.to(torch.int8), highest / LEVELS


def embed(token_ids: torch.Tensor, weight: QuantizedWeight) -> torch.Tensor:
    """Rows [T, in] of the weight, in its dtype."""
    return _rows(weight, token_ids).float().mul_(weight.scales[token_ids, None]).to(weight.dtype)


def linear(x: torch.Tensor, weight: QuantizedWeight) -> torch.Tensor:
    """fp32 [T, out]. Unpacks the whole weight, so it is for machines without a compiler, and for tests."""
    rows = _rows(weight, torch.arange(weight.shape[0]))
    total = x.new_zeros((x.shape[0], weight.shape[0]), dtype=torch.float32)
    for part, weight_part in zip(x.split(GROUP, 1), rows.split(GROUP, 1), strict=True):
        numbers, scales = quantize(part)
        # Exact also in fp32: 64 products of two bytes stay below 2^24.
        total += (numbers.float() @ weight_part.float().T) * scales[:, None]
    return total * weight.scales[: weight.shape[0]]


def _rows(weight: QuantizedWeight, at: torch.Tensor) -> torch.Tensor:
    """int8 [len(at), in]."""
    fours = weight.packed.view(torch.int32)[at // PANEL, :, at % PANEL, 0]
    return (fours.view(torch.uint8) ^ _OFFSET).view(torch.int8)
