"""Which requests a worker has taken up, for routers to tell what its States count already."""

from __future__ import annotations

from collections import deque
from itertools import islice

LIMIT = 1024
"""Ids that are remembered, the last ones: more than come between two States of a watcher that keeps up. Of
those that one misses its router learns by their answers."""


class TakenLog:
    """Ids in order. The event loop's."""

    def __init__(self) -> None:
        self._ids: deque[str] = deque(maxlen=LIMIT)
        self._next = 0

    def add(self, request_id: str) -> None:
        self._ids.append(request_id)
        self._next += 1

    def since(self, cursor: int) -> tuple[list[str], int]:
        """Ids from number `cursor` on, as far as they are remembered, and the next cursor."""
        count = min(self._next - cursor, len(self._ids))
        return list(islice(self._ids, len(self._ids) - count, None)), self._next
