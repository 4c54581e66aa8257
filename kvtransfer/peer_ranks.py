"""A connected peer, rank by rank: which reads bring its blocks into ours.

    equal degrees      rank i of the peer  ---read--->  region of our rank i
    other degrees      rank i of the peer  ---read--->  staging  --head slices-->  our regions

The unit of lease and checksum is always the block of one of the peer's ranks. The second way is
kvtransfer/staged_ranks.py.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from kvtransfer.transport import PeerPool


@dataclass(frozen=True, slots=True)
class Read:
    """Blocks of one rank of the peer, to be read into `local_ids` of `pool.local` and verified."""

    pool: PeerPool
    remote_ids: Sequence[int]
    local_ids: Sequence[int]
    checksums: Sequence[int]


class PeerRanks(Protocol):
    """A connected peer. Used from the transfer thread only, but for `num_ranks`."""

    num_ranks: int

    def reads(
        self, remote_ids: Sequence[int], local_ids: Sequence[int], checksums: Sequence[int]
    ) -> Iterator[Read]:
        """The reads that fill `local_ids` of all our ranks with the peer's `remote_ids`.

        `checksums`: those of rank 0's blocks, then rank 1's, and so on. To ask for the next read is to
        say that the last one was verified. Raises SourceFailed while staging is not quiet.
        """
        ...

    def drain(self) -> bool:
        """True when no operation of this peer is in flight."""
        ...

    def close(self) -> None: ...


class DirectRanks:
    """A peer of our own degree: rank i reads into rank i, without a copy in between."""

    def __init__(self, pools: Sequence[PeerPool]) -> None:
        self.num_ranks = len(pools)
        self._pools = tuple(pools)

    def reads(
        self, remote_ids: Sequence[int], local_ids: Sequence[int], checksums: Sequence[int]
    ) -> Iterator[Read]:
        count = len(remote_ids)
        for rank, pool in enumerate(self._pools):
            yield Read(pool, remote_ids, local_ids, checksums[rank * count : (rank + 1) * count])

    def drain(self) -> bool:
        return drained(self._pools)

    def close(self) -> None:
        for pool in self._pools:
            pool.close()


def drained(pools: Sequence[PeerPool]) -> bool:
    """True when no operation of any of them is in flight."""
    return all(pool.drain() for pool in pools)
