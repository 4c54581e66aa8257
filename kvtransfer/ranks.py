"""A worker's own ranks: their regions, how each is offered, and how those of peers reach them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence

from core.errors import ConfigError, IncompatiblePeer, PeerLost
from core.kv import KVLayout
from kvtransfer.block_heads import BlockCopies
from kvtransfer.checksum import checksum
from kvtransfer.peer_ranks import DirectRanks, PeerRanks
from kvtransfer.region import Region
from kvtransfer.slices import plan_slices, rank_layout
from kvtransfer.staged_ranks import StagedRanks, Staging
from kvtransfer.transport import PeerPool, Transport

STAGING_NBYTES = 4 * 2**20
"""Staging memory per transport and peer degree; small enough to stay in a core's cache."""

MakeTransport = Callable[[Region], Transport]


class Ranks:
    """One region per tensor-parallel rank, all in this process, and the transports that serve them.

    `layout` is the whole model's; `regions[r]` has the blocks of `rank_layout(layout, len(regions))`,
    the same number in each: a block id means the same tokens in every rank. Incarnations of regions must
    differ. `transports`: by name, what makes one for a region. `copies`: of the memory the regions are in.
    The regions stay the caller's to close, after this. Raises ConfigError when the heads do not divide.
    """

    def __init__(
        self,
        layout: KVLayout,
        regions: Sequence[Region],
        transports: Mapping[str, MakeTransport],
        copies: BlockCopies,
    ) -> None:
        rank_layout(layout, len(regions))
        self.regions = tuple(regions)
        self._layout, self._copies = layout, copies
        self._make = dict(transports)
        self._transports = {name: [make(r) for r in self.regions] for name, make in transports.items()}
        self._staging: dict[tuple[str, int], tuple[Staging, Transport]] = {}
        self._lock = threading.Lock()  # of `_staging`: peers are connected on several threads

    @property
    def block_nbytes(self) -> int:
        """Of a block of the whole model: what it takes in all ranks together."""
        return self._layout.block_nbytes

    @property
    def transports(self) -> list[str]:
        """Names of the transports that this worker runs."""
        return list(self._transports)

    def offers(self) -> dict[str, list[bytes]]:
        """For each transport an offer per rank; the first call starts the transports and may block."""
        return {name: [each.offer() for each in ranks] for name, ranks in self._transports.items()}

    def checksums(self, block_ids: Sequence[int]) -> list[int]:
        """Of these blocks in rank 0, then in rank 1, and so on: what is announced with them."""
        return [checksum(region.block(i)) for region in self.regions for i in block_ids]

    def connect(self, name: str, offers: Sequence[bytes]) -> PeerRanks:
        """Reach a peer of any degree over one transport; `offers`: one per rank of it. Blocks.

        Raises PeerLost when a rank cannot be reached, IncompatiblePeer when its blocks do not fit ours.
        """
        if not offers:
            raise PeerLost(f"the peer offers no rank over {name}")
        if len(offers) == len(self.regions):
            return DirectRanks(_connect(self._transports[name], offers))
        layout = self._layout
        try:
            rank_layout(layout, len(offers))
        except ConfigError:
            raise IncompatiblePeer("tensor_parallel_size", len(self.regions), len(offers)) from None
        slices = plan_slices(layout.num_kv_heads, len(offers), len(self.regions))
        staging, transport = self._staged(name, len(offers))
        pools = _connect([transport] * len(offers), offers)
        return StagedRanks(pools, staging, self.regions, slices, layout, self._copies)

    def close(self) -> None:
        """Stop offering; after the peers are closed. Idempotent."""
        for ranks in self._transports.values():
            for transport in ranks:
                transport.close()
        for staging, transport in self._staging.values():
            transport.close()
            staging.region.close()

    def _staged(self, name: str, degree: int) -> tuple[Staging, Transport]:
        with self._lock:
            if (name, degree) not in self._staging:
                block_nbytes = rank_layout(self._layout, degree).block_nbytes
                incarnation = f"{self.regions[0].incarnation}/staging-{degree}"
                count = max(1, STAGING_NBYTES // block_nbytes)
                region = self.regions[0].another(count, block_nbytes, incarnation)
                self._staging[name, degree] = Staging(region), self._make[name](region)
            return self._staging[name, degree]


def _connect(transports: Sequence[Transport], offers: Sequence[bytes]) -> list[PeerPool]:
    """A pool per rank of the peer, or none."""
    pools: list[PeerPool] = []
    try:
        for transport, offer in zip(transports, offers, strict=True):
            pools.append(transport.connect(offer))
    except BaseException:
        for pool in pools:
            pool.close()
        raise
    return pools
