"""The device pool of KV blocks: every block is one contiguous run of bytes, laid out as `KVLayout` says.

A block is what is hashed, leased, transferred and stored, so it is contiguous over all layers. A run, the K
or the V of one head of one layer in one block, is contiguous too: what kernels gather.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch

from core.errors import ConfigError
from core.kv import SCALED_BITS, KVLayout
from engine.kv_numbers import dequantize, quantize, saturated
from engine.models.dtype import KV_DTYPES


@dataclass(frozen=True, slots=True)
class Runs:
    """The K or the V of one layer, as views of the pool.

    `numbers`: [num_kv_heads, num_blocks, block_size, head_dim]; of int4 head_dim / 2, two in each uint8.
    `scales`: bf16 [num_kv_heads, num_blocks, block_size] of scaled formats. `zeros`: uint8 of the same shape
    of int4. See `engine.kv_numbers`.
    """

    number_format: str
    numbers: torch.Tensor
    scales: torch.Tensor | None
    zeros: torch.Tensor | None

    def store(self, x: torch.Tensor, block_ids: torch.Tensor, offsets: torch.Tensor) -> None:
        """Write x [T, num_kv_heads, head_dim], row i to token `offsets[i]` of block `block_ids[i]`."""
        heads = x.transpose(0, 1)
        if self.scales is None:
            self.numbers[:, block_ids, offsets] = self._plain(heads)
            return
        numbers, scales, zeros = quantize(heads, self.number_format)
        self.numbers[:, block_ids, offsets] = numbers
        self.scales[:, block_ids, offsets] = scales
        if self.zeros is not None and zeros is not None:
            self.zeros[:, block_ids, offsets] = zeros

    def load(self, block_ids: torch.Tensor) -> torch.Tensor:
        """[num_kv_heads, len(block_ids) * block_size, head_dim]; fp32, plain formats as they are."""
        numbers = _pick(self.numbers, block_ids)
        if self.scales is not None:
            zeros = None if self.zeros is None else _pick(self.zeros, block_ids)
            numbers = dequantize(numbers, _pick(self.scales, block_ids), zeros)
        return numbers.flatten(1, 2)

    def rounded(self, x: torch.Tensor) -> torch.Tensor:
        """x [..., head_dim] as `load` would give it after `store`."""
        if self.scales is None:
            return self._plain(x)
        return dequantize(*quantize(x, self.number_format))

    def _plain(self, x: torch.Tensor) -> torch.Tensor:
        dtype = self.numbers.dtype
        return saturated(x, dtype) if dtype.itemsize == 1 else x.to(dtype)


def _pick(runs: torch.Tensor, block_ids: torch.Tensor) -> torch.Tensor:
    """runs[:, block_ids]; `index_select` copies whole slices of a first dim, of another number by number."""
    return runs.transpose(0, 1).index_select(0, block_ids).transpose(0, 1)


class KVCache:
    """The pool of one worker, over `buffer` (shared memory that peers may read) or new on `device`.

    Every page is written once here, so that no step pays for page faults and no slot starts as NaN.
    Raises ConfigError when `buffer` is smaller than `num_blocks` blocks or memory runs out.
    """

    def __init__(
        self,
        layout: KVLayout,
        num_blocks: int,
        buffer: memoryview | None = None,
        device: torch.device | str = "cpu",
    ) -> None:
        self.layout = layout
        self.num_blocks = num_blocks
        shape = (num_blocks, layout.block_nbytes)
        self.raw = _over(buffer, shape) if buffer is not None else _allocate(shape, device)
        """uint8 [num_blocks, block_nbytes]: what is moved and stored."""
        self.raw.zero_()
        self._layers = [_layer_runs(self.raw, layout, layer) for layer in range(layout.num_layers)]

    @cached_property
    def pool(self) -> torch.Tensor:
        """All numbers as one tensor [num_blocks, num_layers, num_kv_heads, 2, block_size, head_dim]; only of
        plain dtypes without skipped layers."""
        layout = self.layout
        shape = (layout.num_layers, layout.num_kv_heads, 2, layout.block_size, layout.head_dim)
        return self.raw.view(KV_DTYPES[layout.identity]).view(self.num_blocks, *shape)

    def keys(self, layer: int) -> Runs:
        """K of one layer."""
        return self._layers[layer][0]

    def values(self, layer: int) -> Runs:
        """V of one layer."""
        return self._layers[layer][1]

    def copy_block(self, src: int, dst: int) -> None:
        """Copy all layers of block `src` into block `dst` (copy-on-write of a shared tail block)."""
        self.raw[dst].copy_(self.raw[src])


def _layer_runs(raw: torch.Tensor, layout: KVLayout, layer: int) -> tuple[Runs, Runs]:
    first = layout.num_kv_heads * sum(map(layout.head_nbytes, range(layer)))
    head_nbytes = layout.head_nbytes(layer)
    heads = raw[:, first : first + layout.num_kv_heads * head_nbytes]
    heads = heads.unflatten(1, (layout.num_kv_heads, head_nbytes)).transpose(0, 1)
    key_format, value_format = layout.formats(layer)
    key_nbytes = layout.run_nbytes(key_format)
    return (
        _runs(heads[:, :, :key_nbytes], layout, key_format),
        _runs(heads[:, :, key_nbytes:], layout, value_format),
    )


def _runs(run: torch.Tensor, layout: KVLayout, number_format: str) -> Runs:
    """`run`: uint8 [num_kv_heads, num_blocks, bytes of a run]."""
    end = layout.numbers_nbytes(number_format)
    numbers = run[:, :, :end]
    if number_format not in SCALED_BITS:
        numbers = numbers.view(KV_DTYPES[number_format])
    elif number_format == "int8":
        numbers = numbers.view(torch.int8)
    numbers = numbers.unflatten(2, (layout.block_size, -1))
    if number_format not in SCALED_BITS:
        return Runs(number_format, numbers, None, None)
    zeros_at = end + 2 * layout.block_size
    scales = run[:, :, end:zeros_at].view(torch.bfloat16)
    return Runs(number_format, numbers, scales, run[:, :, zeros_at:] if number_format == "int4" else None)


def _allocate(shape: tuple[int, int], device: torch.device | str) -> torch.Tensor:
    try:
        return torch.empty(shape, dtype=torch.uint8, device=device)
    except RuntimeError as error:
        raise ConfigError(
            f"no memory for a KV pool of {shape[0]} blocks; lower kv_cache_memory_bytes or num_blocks"
        ) from error


def _over(buffer: memoryview, shape: tuple[int, int]) -> torch.Tensor:
    num_blocks, block_nbytes = shape
    need = num_blocks * block_nbytes
    if buffer.nbytes < need:
        raise ConfigError(
            f"the KV region has {buffer.nbytes} bytes but {num_blocks} blocks need {need}; "
            "make the region larger or lower num_blocks"
        )
    return torch.frombuffer(buffer, dtype=torch.uint8, count=need).view(shape)
