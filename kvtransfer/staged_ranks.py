"""A peer of another tensor-parallel degree: its blocks pass through staging memory into our ranks.

Only bytes that were verified reach our blocks, and a read that ends late can write nothing but staging.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from core.errors import SourceFailed
from core.kv import KVLayout
from kvtransfer.peer_ranks import Read, drained
from kvtransfer.region import Region
from kvtransfer.slices import HeadSlice, columns, rank_layout
from kvtransfer.transport import PeerPool


class Staging:
    """Memory that blocks of peers of one degree pass through; shared by them, one read at a time."""

    def __init__(self, region: Region) -> None:
        self.region = region
        self._last: PeerPool | None = None

    def claim(self, pool: PeerPool) -> None:
        """The pool will write here. Raises SourceFailed while an earlier read still may."""
        if self._last is not None and not self._last.drain():
            raise SourceFailed("a read that ran out of time may still write the staging memory; come back")
        self._last = pool


class StagedRanks:
    """A peer of another degree: verified blocks are cut into head slices and copied to our ranks.

    `pools` read into `staging`, whose region has blocks of the peer's ranks; `regions` are those of ours;
    `layout` is the whole model's.
    """

    def __init__(
        self,
        pools: Sequence[PeerPool],
        staging: Staging,
        regions: Sequence[Region],
        slices: Sequence[HeadSlice],
        layout: KVLayout,
    ) -> None:
        self.num_ranks = len(pools)
        self._pools = tuple(pools)
        self._staging = staging
        self._slices = [[s for s in slices if s.src_rank == rank] for rank in range(len(pools))]
        self._bands = layout.bands
        self._theirs = _rows(staging.region, rank_layout(layout, len(pools)))
        self._ours = [_rows(region, rank_layout(layout, len(regions))) for region in regions]

    def reads(
        self, remote_ids: Sequence[int], local_ids: Sequence[int], checksums: Sequence[int]
    ) -> Iterator[Read]:
        count, step = len(remote_ids), self._staging.region.num_blocks
        for at in range(0, count, step):
            chunk = slice(at, min(at + step, count))
            for rank, pool in enumerate(self._pools):
                self._staging.claim(pool)
                sums = checksums[rank * count + chunk.start : rank * count + chunk.stop]
                yield Read(pool, remote_ids[chunk], range(len(sums)), sums)
                self._place(rank, local_ids[chunk])

    def _place(self, rank: int, local_ids: Sequence[int]) -> None:
        """Copy the heads of the peer's `rank` from staging to our ranks; the bytes are there on return."""
        for part in self._slices[rank]:
            targets = self._ours[part.dst_rank]
            for band, source, target in zip(self._bands, self._theirs, targets, strict=True):
                theirs = columns(part.src_head, part.num_heads, band.head_nbytes)
                ours = columns(part.dst_head, part.num_heads, band.head_nbytes)
                for staged, local in enumerate(local_ids):
                    target[local, :, ours].copy_(source[staged, :, theirs])
            if targets[0].is_cuda:
                torch.cuda.current_stream(targets[0].device).synchronize()

    def drain(self) -> bool:
        return drained(self._pools)

    def close(self) -> None:
        for pool in self._pools:
            pool.close()


def _rows(region: Region, layout: KVLayout) -> list[torch.Tensor]:
    """For each band uint8 `[num_blocks, layers of the band, bytes of a row]` over a region's memory, host's
    or GPU's; `layout` is that of a rank."""
    blocks, rows = torch.as_tensor(region.blocks), []
    for band in layout.bands:
        nbytes = layout.num_kv_heads * band.head_nbytes
        part = blocks[:, band.offset : band.offset + band.num_layers * nbytes]
        rows.append(part.unflatten(1, (band.num_layers, nbytes)))
    return rows
