"""Where a load ends: blocks of the pool that belong to somebody else and may be wanted back at any moment."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress

from kvtransfer.host_tier import HostTier
from kvtransfer.tier_pool import TierPool


class Target:
    """The pool's `block_ids` are written on the copy thread, `arrived` is called on the loop that made this;
    after `revoke` neither happens any more. The lock is held for one batch's copy."""

    def __init__(
        self,
        host: HostTier,
        hashes: Sequence[bytes],
        pool: TierPool,
        block_ids: Sequence[int],
        arrived: Callable[[int], None],
    ) -> None:
        self._host, self._hashes, self._arrived = host, hashes, arrived
        self._pool, self._block_ids = pool, block_ids
        self._loop = asyncio.get_running_loop()
        self._lock = threading.Lock()
        self._revoked = False

    def fill(self, first: int, last: int) -> int:
        """Copy what the host tier holds of these; how many leading ones that was."""
        with self._lock:
            if self._revoked:
                return 0
            block_ids = self._block_ids[first:last]
            return self._host.load(
                self._hashes[first:last],
                lambda payloads: self._pool.write(block_ids[: len(payloads)], payloads),
            )

    def report(self, count: int) -> None:
        with suppress(RuntimeError):  # the caller's loop is closed: the process is leaving
            self._loop.call_soon_threadsafe(self._tell, count)

    def _tell(self, count: int) -> None:
        if not self._revoked:
            self._arrived(count)

    def revoke(self) -> None:
        """Returns once nothing writes; that takes one batch's copy at most."""
        with self._lock:
            self._revoked = True
