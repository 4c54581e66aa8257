"""Two workers on one host: the reader maps the owner's region and copies from it.

A memcpy cannot fail and does not notice that the owner died: a mapped memfd outlives it. So over
this transport a dead owner shows only through the lease (its stream broke), which is checked after
every read.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from core.errors import PeerLost
from kvtransfer.offers import ShmOffer, decode, encode, require_same_blocks
from kvtransfer.region import Region
from kvtransfer.transport import require_pairs


def host_id() -> str:
    """The boot of the kernel and the pid namespace: where it is equal, a pid means the same process."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot} {os.readlink('/proc/self/ns/pid')}"


class ShmTransport:
    name = "shm"

    def __init__(self, region: Region) -> None:
        self._region = region

    def offer(self) -> bytes:
        region = self._region
        return encode(
            ShmOffer(
                host=host_id(),
                pid=region.pid,
                fd=region.fd,
                incarnation=region.incarnation,
                num_blocks=region.num_blocks,
                block_nbytes=region.block_nbytes,
            )
        )

    def connect(self, offer: bytes) -> ShmPool:
        """Map the peer's region. Raises PeerLost or IncompatiblePeer."""
        peer = decode(offer, ShmOffer)
        require_same_blocks(peer, self._region)
        if peer.host != host_id():
            raise PeerLost(
                "the peer runs on another host or in another pid namespace, where shm cannot reach it; "
                "start both workers with --transport nixl"
            )
        remote = Region.attach(peer.pid, peer.fd, peer.incarnation)
        if (remote.num_blocks, remote.block_nbytes) != (peer.num_blocks, peer.block_nbytes):
            remote.close()
            raise PeerLost("the peer's region has another size than its offer says; connect again")
        return ShmPool(self._region, remote)

    def close(self) -> None:
        """Nothing is held here: pools hold their mappings, the worker its region."""


class ShmPool:
    """A peer's mapped region. Every call is done when it returns, so it is always quiet."""

    def __init__(self, local: Region, remote: Region) -> None:
        self.local = local
        self._region = remote
        self._ours: np.ndarray | None = local.blocks
        self._theirs: np.ndarray | None = remote.blocks

    def read(self, remote_ids: Sequence[int], local_ids: Sequence[int], timeout_s: float) -> None:
        """Copies with the GIL released. Raises PeerLost when closed, out of range or too slow."""
        local, remote = self._ours, self._theirs
        if local is None or remote is None:
            raise PeerLost("the connection to this peer was closed; connect again")
        require_pairs(remote_ids, local_ids, len(remote), len(local))
        deadline = time.monotonic() + timeout_s
        for theirs, ours, count in runs(remote_ids, local_ids):
            if time.monotonic() > deadline:
                raise PeerLost(f"copying {len(remote_ids)} blocks took longer than {timeout_s:g} s")
            np.copyto(local[ours : ours + count], remote[theirs : theirs + count])

    def drain(self) -> bool:
        return True

    def close(self) -> None:
        self._ours = self._theirs = None
        self._region.close()


def runs(remote_ids: Sequence[int], local_ids: Sequence[int]) -> Iterator[tuple[int, int, int]]:
    """Merge pairs that are adjacent on both sides into (remote, local, count)."""
    start = 0
    for i in range(1, len(remote_ids) + 1):
        adjacent = (
            i < len(remote_ids)
            and remote_ids[i] == remote_ids[i - 1] + 1
            and local_ids[i] == local_ids[i - 1] + 1
        )
        if not adjacent:
            yield remote_ids[start], local_ids[start], i - start
            start = i
