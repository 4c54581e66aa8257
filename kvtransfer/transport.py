"""How KV bytes move between two workers: who calls what, and when.

    owner of the blocks (P)              reader of the blocks (D)
    -----------------------              ------------------------
    offer()          at Connect   --->   connect(offer)      once per peer, rank and life; blocking
                                         pool.read(...)      per announced run of blocks, on the
                                                             one transfer thread; blocking
                                         pool.drain()        while a timed-out read is in flight
                                         pool.close()        peer gone, replaced or evicted
    close()          at exit             close()             at exit, after its pools

Only the reader begins anything: it pulls, so nobody else ever writes its memory. A read says nothing
about whether the bytes were the right ones: the caller checks the lease after it, then the checksums.
A worker that is split over tensor-parallel ranks has a region, and so a transport, for each of them
(kvtransfer/ranks.py).

Quiet: a local block is quiet when nothing can write it any more. `read` leaves its blocks quiet on
return and on every error but one: after `ReadPending` the operation still runs below and may write
them at any later time (measured with NIXL: even after its handle was released). They must be kept
from any other use until `drain` returns True.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import ClassVar, Protocol

import numpy as np

from core.errors import ConfigError, PeerLost
from kvtransfer.region import Region


class ReadPending(PeerLost):
    """A read did not end in time and still runs; its local blocks are not quiet until drained."""

    code = "read_pending"


class PeerPool(Protocol):
    """A connected peer's blocks, read into the blocks of `local`. Used from one thread only."""

    local: Region

    def read(self, remote_ids: Sequence[int], local_ids: Sequence[int], timeout_s: float) -> None:
        """Copy the peer's blocks `remote_ids` into ours `local_ids`, pairwise; blocks until done.

        Raises PeerLost (peer or link gone, pool closed, ids outside a pool) or ReadPending.
        """
        ...

    def drain(self) -> bool:
        """True when no operation of this pool is in flight. Does not block; valid after close."""
        ...

    def close(self) -> None:
        """Give the connection up; idempotent. It ends once pending operations have."""
        ...


class Transport(Protocol):
    """One way to move bytes into this worker's region and to offer it to others."""

    name: str

    def offer(self) -> bytes:
        """Versioned bytes with which a peer's `connect` reaches our blocks; the first call may block."""
        ...

    def connect(self, offer: bytes) -> PeerPool:
        """Reach a peer's blocks; blocks, so call it off the event loop.

        Raises PeerLost when it cannot be reached, IncompatiblePeer when its blocks are not like ours.
        """
        ...

    def close(self) -> None: ...


TRANSPORTS = ("shm", "nixl", "collective")


def choose(setting: str, ours: Collection[str], theirs: Collection[str]) -> list[str]:
    """Transports to try with a peer, best first: `auto` is any, in the order of TRANSPORTS; else just
    the named one.

    `ours` and `theirs`: names that each side runs. A peer on another host shows at `connect`: shm
    then raises PeerLost, and the next one is tried. Raises PeerLost when there is none in common,
    ConfigError for an unknown setting.
    """
    if setting not in ("auto", *TRANSPORTS):
        raise ConfigError(f"transport {setting!r} is not known; choose auto, {', '.join(TRANSPORTS)}")
    wanted = TRANSPORTS if setting == "auto" else (setting,)
    common = [name for name in wanted if name in ours and name in theirs]
    if not common:
        raise PeerLost(
            f"no transport in common: --transport {setting} runs {_listed(ours)} here, the peer offers "
            f"{_listed(theirs)}; start both workers with the same --transport"
        )
    return common


def _listed(names: Collection[str]) -> str:
    return ", ".join(sorted(names)) or "nothing"


def require_pairs(
    remote_ids: Sequence[int], local_ids: Sequence[int], num_remote: int, num_local: int
) -> None:
    """Raises PeerLost unless the ids pair up and each names a block of its pool."""
    if len(remote_ids) != len(local_ids):
        raise PeerLost(f"{len(remote_ids)} blocks of the peer cannot fill {len(local_ids)} of ours")
    for whose, ids, num_blocks in (
        ("the peer's", remote_ids, num_remote),
        ("our", local_ids, num_local),
    ):
        bad = [i for i in ids if not 0 <= i < num_blocks]
        if bad:
            raise PeerLost(f"block {bad[0]} is outside {whose} pool of {num_blocks} blocks")


class FakeTransport:
    """In one process, for tests. `lost` fails reads; `stuck` leaves them pending until it is cleared."""

    name = "fake"
    _regions: ClassVar[dict[bytes, Region]] = {}

    def __init__(self, region: Region) -> None:
        self.region = region

    def offer(self) -> bytes:
        key = self.region.incarnation.encode()
        self._regions[key] = self.region
        return key

    def connect(self, offer: bytes) -> FakePool:
        if offer not in self._regions:
            raise PeerLost(f"no peer offers {offer!r}")
        return FakePool(self.region, self._regions[offer])

    def close(self) -> None:
        self._regions.pop(self.region.incarnation.encode(), None)


class FakePool:
    def __init__(self, local: Region, remote: Region) -> None:
        self.local, self._remote = local, remote
        self.lost = self.stuck = self.closed = False
        self._pending: list[tuple[int, int]] = []

    def read(self, remote_ids: Sequence[int], local_ids: Sequence[int], timeout_s: float) -> None:
        if self.closed or self.lost:
            raise PeerLost("the fake peer is gone")
        self._pending = list(zip(remote_ids, local_ids, strict=True))
        if not self.drain():
            raise ReadPending(f"the fake peer did not answer in {timeout_s} s")

    def drain(self) -> bool:
        if self.stuck:
            return False
        for remote, local in self._pending:
            np.asarray(self.local.blocks)[local] = np.frombuffer(self._remote.block(remote), np.uint8)
        self._pending = []
        return True

    def close(self) -> None:
        self.closed = True
