"""Where a load ends: buffers that belong to somebody else and may be wanted back at any moment."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress

from kvtransfer.host_tier import HostTier


class Target:
    """`into` is written on the copy thread, `arrived` called on the loop that made this; after `revoke`
    neither happens any more. The lock is held for one batch's memcpy."""

    def __init__(
        self,
        host: HostTier,
        hashes: Sequence[bytes],
        into: Sequence[memoryview],
        arrived: Callable[[int], None],
    ) -> None:
        self._host, self._hashes, self._into, self._arrived = host, hashes, into, arrived
        self._loop = asyncio.get_running_loop()
        self._lock = threading.Lock()
        self._revoked = False

    def fill(self, first: int, last: int) -> int:
        """Copy what the host tier holds of these; how many leading ones that was."""
        with self._lock:
            if self._revoked:
                return 0
            return self._host.load(self._hashes[first:last], self._into[first:last])

    def report(self, count: int) -> None:
        with suppress(RuntimeError):  # the caller's loop is closed: the process is leaving
            self._loop.call_soon_threadsafe(self._tell, count)

    def _tell(self, count: int) -> None:
        if not self._revoked:
            self._arrived(count)

    def revoke(self) -> None:
        """Returns once nothing writes; that takes one batch's memcpy at most."""
        with self._lock:
            self._revoked = True
