"""The device pool of KV blocks: one tensor, every block one contiguous run of bytes.

    pool[block, layer, kv head, 0 = K | 1 = V, token of the block, head dim]

A block is what is hashed, leased, transferred and stored, so it is contiguous over all layers. A row
`(block, layer, head, K|V)` is `block_size * head_dim` contiguous numbers: what kernels gather.
"""

from __future__ import annotations

import torch

from core.errors import ConfigError
from core.kv import KVLayout
from engine.models.dtype import KV_DTYPES


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
        dtype = KV_DTYPES[layout.kv_dtype]
        shape = (
            num_blocks,
            layout.num_layers,
            layout.num_kv_heads,
            2,
            layout.block_size,
            layout.head_dim,
        )
        self.pool = _over(buffer, shape, dtype) if buffer is not None else _allocate(shape, dtype, device)
        self.raw = self.pool.view(torch.uint8).view(num_blocks, layout.block_nbytes)
        """uint8 [num_blocks, block_nbytes]: the same memory as what is moved and stored."""
        self.raw.zero_()
        self.rows = self.pool.view(-1, layout.block_size * layout.head_dim)
        """[num_blocks * num_layers * num_kv_heads * 2, block_size * head_dim], see `row_index`."""

    def keys(self, layer: int) -> torch.Tensor:
        """K of one layer as a view [num_blocks, num_kv_heads, block_size, head_dim]."""
        return self.pool[:, layer, :, 0]

    def values(self, layer: int) -> torch.Tensor:
        """V of one layer as a view [num_blocks, num_kv_heads, block_size, head_dim]."""
        return self.pool[:, layer, :, 1]

    def row_index(self, block_ids: torch.Tensor) -> torch.Tensor:
        """Rows of `self.rows` that hold layer 0 of these blocks, int64 [2, num_kv_heads, n].

        Layer l is the same index plus `l * num_kv_heads * 2`.
        """
        heads = torch.arange(self.layout.num_kv_heads).view(1, -1, 1)
        halves = torch.arange(2).view(2, 1, 1)
        first = block_ids.long() * self.layout.num_layers
        return (first * self.layout.num_kv_heads + heads) * 2 + halves

    def copy_block(self, src: int, dst: int) -> None:
        """Copy all layers of block `src` into block `dst` (copy-on-write of a shared tail block)."""
        self.pool[dst].copy_(self.pool[src])


def _allocate(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device | str) -> torch.Tensor:
    try:
        return torch.empty(shape, dtype=dtype, device=device)
    except RuntimeError as error:
        raise ConfigError(
            f"no memory for a KV pool of {shape[0]} blocks; lower kv_cache_memory_bytes or num_blocks"
        ) from error


def _over(buffer: memoryview, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    count = 1
    for size in shape:
        count *= size
    if buffer.nbytes < count * dtype.itemsize:
        raise ConfigError(
            f"the KV region has {buffer.nbytes} bytes but {shape[0]} blocks need "
            f"{count * dtype.itemsize}; make the region larger or lower num_blocks"
        )
    return torch.frombuffer(buffer, dtype=dtype, count=count).view(shape)
