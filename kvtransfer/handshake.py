"""Pairing: may these two workers exchange blocks, and the connections of those that do."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

from core.errors import IncompatiblePeer, PeerLost
from core.kv import Fingerprint


def check(ours: Fingerprint, theirs: Fingerprint) -> None:
    """Raises IncompatiblePeer naming the first field that differs, with both values."""
    difference = ours.difference(theirs)
    if difference is not None:
        raise IncompatiblePeer(*difference)


Peer = TypeVar("Peer")


@dataclass(slots=True)
class _Entry(Generic[Peer]):
    order: int
    pool: asyncio.Task[Peer]


class PeerBook(Generic[Peer]):
    """Connected peers by (worker id, incarnation), at most `limit`; the least recently used goes first.

    A worker's new incarnation replaces its older ones. `retire` takes peers that are no longer
    wanted and must close their pools once no read of theirs is in flight (`Puller.retire`). Event loop only.
    """

    def __init__(self, retire: Callable[[Peer], None], limit: int = 64) -> None:
        self._retire = retire
        self._limit = limit
        self._order = itertools.count()
        self._entries: dict[tuple[str, str], _Entry[Peer]] = {}

    def __len__(self) -> int:
        return len(self._entries)

    async def get(self, worker_id: str, incarnation: str, connect: Callable[[], Awaitable[Peer]]) -> Peer:
        """The connected pool; `connect` runs once for all who wait, and again after it failed.

        Raises what `connect` raises. A caller that is cancelled does not disturb the others.
        """
        key = (worker_id, incarnation)
        entry = self._entries.pop(key, None)
        if entry is None:
            task = asyncio.ensure_future(self._connect(key, connect))
            task.add_done_callback(_retrieve)
            entry = _Entry(next(self._order), task)
        self._entries[key] = entry  # the end of the dictionary: used last
        if len(self._entries) > self._limit:
            self._drop(next(iter(self._entries)))
        return await asyncio.shield(entry.pool)

    def discard(self, worker_id: str, incarnation: str) -> None:
        """Forget a peer that was lost, so that the next `get` connects again."""
        self._drop((worker_id, incarnation))

    def close(self) -> None:
        for key in list(self._entries):
            self._drop(key)

    async def _connect(self, key: tuple[str, str], connect: Callable[[], Awaitable[Peer]]) -> Peer:
        task = asyncio.current_task()
        try:
            pool = await connect()
        except BaseException:
            if self._is_current(key, task):
                del self._entries[key]
            raise
        if not self._is_current(key, task):
            self._retire(pool)
            raise PeerLost(f"worker {key[0]} was dropped while it was being connected")
        mine = self._entries[key].order
        for other, entry in list(self._entries.items()):
            if other[0] == key[0] and entry.order < mine:
                self._drop(other)
        return pool

    def _is_current(self, key: tuple[str, str], task: asyncio.Task | None) -> bool:
        entry = self._entries.get(key)
        return entry is not None and entry.pool is task

    def _drop(self, key: tuple[str, str]) -> None:
        entry = self._entries.pop(key, None)
        if entry is not None and entry.pool.done():  # else `_connect` finds itself dropped
            self._retire(entry.pool.result())


def _retrieve(task: asyncio.Task[Peer]) -> None:
    """Look at the outcome, so that asyncio does not report it when every waiter has left."""
    if not task.cancelled():
        task.exception()
