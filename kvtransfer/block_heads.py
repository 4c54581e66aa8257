"""Blocks as rows of KV heads, and who copies heads between them.

    block      band 0: layers x heads x bytes of a head    band 1: ...      (`core.kv.Band`)

One band unless `--kv-quant-skip-layers` stores some layers otherwise. The copies are kernels, which live
where this room cannot look: a worker passes its kernel set in.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol

import torch

from core.kv import Band, KVLayout
from kvtransfer.region import Region


class BlockCopies(Protocol):
    """Block `block_ids[i]` of a pool, heads `heads`, from and to block i of a buffer, heads `buffer_heads`.

    pool, buffer: [blocks, layers, heads, ...] of one dtype on one device; block_ids: distinct, at least one,
    an int tensor there. No heads given: all. On a GPU queued on the calling thread's current stream.
    """

    def gather_blocks(
        self,
        pool: torch.Tensor,
        block_ids: torch.Tensor,
        buffer: torch.Tensor,
        heads: range | None = None,
        buffer_heads: range | None = None,
    ) -> None: ...

    def scatter_blocks(
        self,
        pool: torch.Tensor,
        block_ids: torch.Tensor,
        buffer: torch.Tensor,
        heads: range | None = None,
        buffer_heads: range | None = None,
    ) -> None: ...


def region_bands(region: Region, layout: KVLayout) -> list[torch.Tensor]:
    """`band_views` of a region's own memory, the host's or a GPU's; `layout` is that of its rank."""
    return band_views(torch.as_tensor(region.blocks), layout.num_kv_heads, layout.bands)


def band_views(blocks: torch.Tensor, num_kv_heads: int, bands: Iterable[Band]) -> list[torch.Tensor]:
    """Of blocks uint8 `[n, block_nbytes]` for each band a view `[n, layers, heads, bytes of a head]`."""
    views = []
    for band in bands:
        end = band.offset + band.num_layers * num_kv_heads * band.head_nbytes
        rows = blocks[:, band.offset : end]
        views.append(rows.unflatten(1, (band.num_layers, num_kv_heads, band.head_nbytes)))
    return views


def ids_on(device: torch.device, block_ids: Sequence[int]) -> torch.Tensor:
    """Block ids as kernels take them, int32 `[n]`."""
    return torch.tensor(block_ids, dtype=torch.int32).to(device)
