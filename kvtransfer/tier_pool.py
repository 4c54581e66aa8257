"""A worker's KV pool as its tiers see it: blocks of the whole model, whatever its memory is split over.

    RegionPool    one region in host memory              one memcpy a block
    RankPool      a region per tensor-parallel rank      the heads of each rank, to and from their place
    DevicePool    one region in GPU memory               gathered there, then copied beside the computation

So what lies in a tier does not tell how many ranks made it, and ranks of any number read it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch

from core.errors import ConfigError
from core.kv import KVLayout
from kvtransfer.block_heads import BlockCopies, band_views, ids_on, region_bands
from kvtransfer.copies import copy
from kvtransfer.device_region import DeviceRegion, Lane
from kvtransfer.region import Region
from kvtransfer.slices import heads_of, rank_layout

STAGING_NBYTES = 64 * 2**20
"""GPU memory that blocks on their way to the host pass through; out of the reserve of `planning.capacity`."""

Landing = Callable[[], None]
"""Waits, on whatever thread, until bytes that were asked for are there."""


class TierPool(Protocol):
    """`block_nbytes`: bytes of a block of the whole model, laid out as `core.kv.KVLayout` says."""

    block_nbytes: int

    def pin(self, memory: memoryview) -> None:
        """Host memory that blocks will be copied from and to, before the first copy. Raises ConfigError."""
        ...

    def read(self, block_ids: Sequence[int], into: Sequence[memoryview]) -> Landing | None:
        """Copy blocks out, on the engine's thread; once it returns, the pool's may be written again.

        None: the bytes are in `into`. Else they are once the `Landing` returns; it raises when they are not.
        """
        ...

    def write(self, block_ids: Sequence[int], payloads: Sequence[memoryview]) -> None:
        """Copy blocks in, on any thread; they are there on return."""
        ...


class RegionPool:
    def __init__(self, region: Region) -> None:
        self.block_nbytes = region.block_nbytes
        self._region = region

    def pin(self, memory: memoryview) -> None:
        pass

    def read(self, block_ids: Sequence[int], into: Sequence[memoryview]) -> None:
        for block_id, buffer in zip(block_ids, into, strict=True):
            copy(buffer, self._region.block(block_id))

    def write(self, block_ids: Sequence[int], payloads: Sequence[memoryview]) -> None:
        for block_id, payload in zip(block_ids, payloads, strict=True):
            copy(self._region.block(block_id), payload)


class RankPool:
    """`layout`: the whole model's; `regions`: of its ranks in order, all mapped in this process.

    A step has ended in all ranks, as far as K and V go, when it has ended in rank 0: they meet behind them.
    """

    def __init__(self, layout: KVLayout, regions: Sequence[Region], copies: BlockCopies) -> None:
        self.block_nbytes = layout.block_nbytes
        degree = len(regions)
        self._num_kv_heads, self._bands = layout.num_kv_heads, layout.bands
        self._copies = copies
        self._ranks = [
            (heads_of(layout.num_kv_heads, degree, rank), region_bands(region, rank_layout(layout, degree)))
            for rank, region in enumerate(regions)
        ]

    def pin(self, memory: memoryview) -> None:
        pass

    def read(self, block_ids: Sequence[int], into: Sequence[memoryview]) -> None:
        self._move(self._copies.gather_blocks, block_ids, into)

    def write(self, block_ids: Sequence[int], payloads: Sequence[memoryview]) -> None:
        self._move(self._copies.scatter_blocks, block_ids, payloads)

    def _move(
        self, move: Callable[..., None], block_ids: Sequence[int], buffers: Sequence[memoryview]
    ) -> None:
        for one, buffer in zip(torch.tensor(block_ids).split(1), buffers, strict=True):
            whole = band_views(_tensor(buffer)[None], self._num_kv_heads, self._bands)
            for heads, parts in self._ranks:
                for ours, block in zip(parts, whole, strict=True):
                    move(ours, one, block, buffer_heads=heads)


class DevicePool:
    """Reading gathers blocks into one of two staging buffers, so that the pool is free again after a copy at
    the GPU's own speed; the way over the bus is a stream's of its own. Writing needs no kernel: a block is
    one run of bytes on both sides. In a region of CPU memory all of it happens at once.
    """

    def __init__(
        self, region: DeviceRegion, copies: BlockCopies, staging_nbytes: int = STAGING_NBYTES
    ) -> None:
        self.block_nbytes = region.block_nbytes
        self._region, self._copies = region, copies
        self._device = region.blocks.device
        self._down = Lane(self._device)
        count = max(1, staging_nbytes // 2 // region.block_nbytes)
        self._staging = [region.blocks.new_empty((count, region.block_nbytes)) for _ in range(2)]
        self._landed: list[Landing] = [_at_once, _at_once]
        self._turn = 0

    def pin(self, memory: memoryview) -> None:
        if self._device.type != "cuda":
            return
        runtime: Any = torch.cuda.cudart()
        status = runtime.cudaHostRegister(_tensor(memory).data_ptr(), memory.nbytes, 0)
        if status != runtime.cudaError.success:
            raise ConfigError(
                f"CUDA cannot pin {memory.nbytes / 2**20:,.0f} MiB for the host tier ({status}); set a "
                "smaller --host-cache-bytes, or raise the limit of locked memory (ulimit -l)"
            )

    def read(self, block_ids: Sequence[int], into: Sequence[memoryview]) -> Landing:
        count = len(self._staging[0])
        last: Landing = _at_once
        for at in range(0, len(block_ids), count):
            ids, slots = block_ids[at : at + count], into[at : at + count]
            self._landed[self._turn]()  # or its bytes would be overwritten on their way
            staging = self._staging[self._turn][: len(ids)]
            self._copies.gather_blocks(
                _as_runs(self._region.blocks), ids_on(self._device, ids), _as_runs(staging)
            )
            with self._down.behind():
                for row, slot in zip(staging, slots, strict=True):
                    _tensor(slot).copy_(row, non_blocking=True)
            last = self._landed[self._turn] = self._down.mark()
            self._turn = 1 - self._turn
        if self._device.type == "cuda":
            torch.cuda.current_stream(self._device).synchronize()  # the gathers, which are short
        return last

    def write(self, block_ids: Sequence[int], payloads: Sequence[memoryview]) -> None:
        blocks = self._region.blocks
        with self._region.aside():
            for block_id, payload in zip(block_ids, payloads, strict=True):
                blocks[block_id].copy_(_tensor(payload), non_blocking=True)


def _at_once() -> None:
    pass


def _as_runs(blocks: torch.Tensor) -> torch.Tensor:
    """Blocks [n, nbytes] as [n, 1 layer, 1 head, nbytes]."""
    return blocks[:, None, None]


def _tensor(memory: memoryview) -> torch.Tensor:
    return torch.frombuffer(memory, dtype=torch.uint8)
