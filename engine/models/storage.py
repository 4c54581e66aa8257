"""How a parameter lies in the weights file: as a tensor in the compute dtype, or in int8 with scales."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import torch

from core.errors import ConfigError
from engine.kernels import int8
from engine.kernels.int8 import QuantizedWeight, Weight
from engine.models.dtype import TORCH_DTYPES
from engine.models.parameter import Parameter
from engine.models.weights_file import StoredTensor

_SLICE = 2048
"""Rows quantized at once, which bounds the memory beyond the file's."""


class Storage(Protocol):
    """One parameter; `tensors` and `stored` map its tensors' names in the file to them."""

    def layout(self) -> list[StoredTensor]:
        """What the file holds for it."""
        ...

    def write(self, rows: torch.Tensor, first: int, stored: Mapping[str, torch.Tensor]) -> None:
        """Put the checkpoint's `rows` [n, ...] at row `first` of the parameter."""
        ...

    def read(self, tensors: Mapping[str, torch.Tensor]) -> Weight:
        """The parameter as a kernel set takes it, over these tensors."""
        ...


def storage_of(parameter: Parameter, dtype: str, quantization: str) -> Storage:
    """Under `int8` every matrix, the embedding too, is quantized; norms and biases stay in `dtype`.

    Raises ConfigError for a matrix that the int8 kernels cannot take.
    """
    if quantization == "none" or len(parameter.shape) < 2:
        return _Plain(parameter, TORCH_DTYPES[dtype])
    if reason := int8.unsupported(parameter.shape):
        raise ConfigError(f"{parameter.name} cannot be quantized to int8: {reason}; use --quantization none")
    return _Int8(parameter, TORCH_DTYPES[dtype])


class _Plain:
    def __init__(self, parameter: Parameter, dtype: torch.dtype) -> None:
        self._stored = StoredTensor(parameter.name, parameter.shape, dtype)

    def layout(self) -> list[StoredTensor]:
        return [self._stored]

    def write(self, rows: torch.Tensor, first: int, stored: Mapping[str, torch.Tensor]) -> None:
        stored[self._stored.name][first : first + rows.shape[0]] = rows

    def read(self, tensors: Mapping[str, torch.Tensor]) -> torch.Tensor:
        return tensors[self._stored.name]


class _Int8:
    def __init__(self, parameter: Parameter, dtype: torch.dtype) -> None:
        out, width = parameter.shape
        self._shape, self._dtype = (out, width), dtype
        panels = int8.packed_shape(parameter.shape)
        self._packed = StoredTensor(parameter.name, panels, torch.uint8)
        self._scales = StoredTensor(f"{parameter.name}.scales", (panels[0] * int8.PANEL,), torch.float32)

    def layout(self) -> list[StoredTensor]:
        return [self._packed, self._scales]

    def write(self, rows: torch.Tensor, first: int, stored: Mapping[str, torch.Tensor]) -> None:
        packed, scales = stored[self._packed.name], stored[self._scales.name]
        for at in range(0, rows.shape[0], _SLICE):
            int8.pack(rows[at : at + _SLICE], first + at, packed, scales)

    def read(self, tensors: Mapping[str, torch.Tensor]) -> QuantizedWeight:
        packed, scales = tensors[self._packed.name], tensors[self._scales.name]
        return QuantizedWeight(packed, scales, self._shape, self._dtype)
