"""A peer of another tensor-parallel degree: its blocks pass through staging memory into our ranks.

Only bytes that were verified reach our blocks, and a read that ends late can write nothing but staging.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from core.errors import SourceFailed
from core.kv import KVLayout
from kvtransfer.block_heads import BlockCopies, ids_on, region_bands
from kvtransfer.peer_ranks import Read, drained
from kvtransfer.region import Region
from kvtransfer.slices import HeadSlice, rank_layout
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
        copies: BlockCopies,
    ) -> None:
        self.num_ranks = len(pools)
        self._pools = tuple(pools)
        self._staging = staging
        self._slices = [[s for s in slices if s.src_rank == rank] for rank in range(len(pools))]
        self._copies = copies
        self._theirs = region_bands(staging.region, rank_layout(layout, len(pools)))
        own = rank_layout(layout, len(regions))
        self._ours = [(region, region_bands(region, own)) for region in regions]

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
            region, targets = self._ours[part.dst_rank]
            ours = range(part.dst_head, part.dst_head + part.num_heads)
            theirs = range(part.src_head, part.src_head + part.num_heads)
            with region.aside():
                for staged, target in zip(self._theirs, targets, strict=True):
                    # Where each rank has a GPU of its own, one copy between two for all blocks.
                    source = staged[: len(local_ids)].to(target.device)
                    ids = ids_on(target.device, local_ids)
                    self._copies.scatter_blocks(target, ids, source, ours, theirs)

    def drain(self) -> bool:
        return drained(self._pools)

    def close(self) -> None:
        for pool in self._pools:
            pool.close()
