"""Which blocks a worker holds, by tier, and the numbered changes that routers follow."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterable
from itertools import islice

from core.blocks import block_key
from wire.v1 import worker_pb2 as pb

LOG_LIMIT = 65_536
"""Changes kept for watchers that lag; who lags more gets a snapshot. About 100 bytes each."""


class KVEventLog:
    """Any thread may report and read."""

    def __init__(self, limit: int = LOG_LIMIT) -> None:
        self._lock = threading.Lock()
        self._held: dict[str, set[int]] = {}
        self._log: deque[tuple[str, int, bool]] = deque(maxlen=limit)
        self._next = 0

    def report(self, tier: str, stored: Iterable[bytes] = (), evicted: Iterable[bytes] = ()) -> None:
        """These blocks are in `tier` now, or no longer. What was known already changes nothing.

        Calls of one tier come in the order in which it changed. Waits for nothing but the books.
        """
        gone, fresh = [block_key(h) for h in evicted], [block_key(h) for h in stored]
        with self._lock:
            held = self._held.setdefault(tier, set())
            for key in gone:
                if key in held:
                    held.remove(key)
                    self._append(tier, key, False)
            for key in fresh:
                if key not in held:
                    held.add(key)
                    self._append(tier, key, True)

    def since(self, cursor: int | None) -> tuple[pb.KvEvents | None, int]:
        """What changed from number `cursor` on, as one message, and the next cursor.

        None when nothing did. A snapshot for cursor None, and when the log does not reach back so far.
        """
        with self._lock:
            next_, count = self._next, None if cursor is None else self._next - cursor
            if count is None or count > len(self._log):
                held, fresh = {tier: list(keys) for tier, keys in self._held.items()}, []
            else:
                held, fresh = None, list(islice(reversed(self._log), count))
        if held is not None:
            everything = [pb.TierChanges(tier=tier, stored=keys) for tier, keys in held.items()]
            return pb.KvEvents(next=next_, snapshot=True, tiers=everything), next_
        if not fresh:
            return None, next_
        fresh.reverse()
        last = {(tier, key): stored for tier, key, stored in fresh}
        tiers: dict[str, pb.TierChanges] = {}
        for (tier, key), stored in last.items():
            changes = tiers.setdefault(tier, pb.TierChanges(tier=tier))
            (changes.stored if stored else changes.evicted).append(key)
        return pb.KvEvents(first=cursor, next=next_, tiers=list(tiers.values())), next_

    def num_held(self, tier: str) -> int:
        with self._lock:
            return len(self._held.get(tier, ()))

    def _append(self, tier: str, key: int, stored: bool) -> None:
        self._log.append((tier, key, stored))
        self._next += 1
