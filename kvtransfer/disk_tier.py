"""The NVMe tier: one file per block, read and written with O_DIRECT on a few threads.

One process owns the directory (see `BlockFiles.open`); index, byte count and cap are its own, so the
cap is exact. While another process holds the lock, and while the directory cannot be used, every lookup
is a miss and every store is dropped; the tier tries again by itself. Other models' files in the same
directory count and age with ours.

    event loop   index, breakers, counters    all state
    threads      BlockFiles                   none; results come back to the loop
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial
from itertools import count
from typing import Any

from core import log
from core.errors import ConfigError
from kvtransfer.breaker import Breaker, Verdict
from kvtransfer.busy import BusyTime
from kvtransfer.deadlines import finish
from kvtransfer.disk_files import DIRECTORY_NBYTES, BlockFiles, Scan
from kvtransfer.disk_index import DiskIndex
from kvtransfer.disk_store import DiskStore
from kvtransfer.gate import Gate
from kvtransfer.threads import DaemonThreads
from kvtransfer.tier import OnChange, TierStats, unheard

THREADS = 4

LOADS_AT_ONCE = 2
"""So that threads which are through with one load find blocks of the next; a third would only wait."""

_HARMLESS = (None, "missing", "abandoned", "fault")
"""Outcomes of a read that do not mean a damaged file."""

_log = log.get("kvtransfer")


class DiskTier:
    """`capacity_nbytes` bounds all bytes under the directory, other namespaces and files being written
    included. `stall_s`: how long loads may go without progress. Opening begins at once on a thread and
    never raises: until it is done all is a miss. Raises ConfigError for a cap that holds no block."""

    name = "disk"

    def __init__(
        self, files: BlockFiles, capacity_nbytes: int, stall_s: float, on_change: OnChange = unheard
    ) -> None:
        least = files.file_nbytes + 4 * DIRECTORY_NBYTES
        if capacity_nbytes < least:
            raise ConfigError(
                f"a disk cache of {capacity_nbytes} bytes holds no block; it takes {least} or more"
            )
        self._files = files
        self._stall_s = stall_s
        self._index = DiskIndex(capacity_nbytes, self._changed)
        self._on_change = on_change
        self._reads = Breaker()
        self._writes = Breaker()
        self._store = DiskStore(files, self._index, self._writes, self._submit)
        self._one_store = asyncio.Lock()
        self._turn = asyncio.Semaphore(LOADS_AT_ONCE)
        self._due_nbytes = 0  # of the loads at work
        self._reads_ended = 0  # threads count without a lock: it only has to change
        self._pool = DaemonThreads(THREADS, "disk-tier")
        self._ready = self._closed = False
        self._opening: Future[Scan] | None = self._pool.submit(files.open, capacity_nbytes)
        self._touching: Future[None] | None = None
        self._queries = self._hits = self._load_nbytes = 0
        self._evictions = self._corrupt = self._dropped = self._errors = 0
        self._loading = BusyTime()

    async def opened(self) -> bool:
        """Wait until opening has ended; whether the directory can be used."""
        if self._opening is not None:
            await asyncio.wait([asyncio.wrap_future(self._opening)])
        return self._usable()

    async def lookup(self, hashes: Sequence[bytes]) -> int:
        self._queries += len(hashes)
        if not self._usable() or self._reads.refuses:
            return 0
        held = self._index.leading(self._paths(hashes))
        self._hits += held
        return held

    async def load(self, hashes: Sequence[bytes], into: Sequence[memoryview]) -> int:
        async with self._turn:  # waiting for it does not count as the disk's silence
            return await self._load(self._paths(hashes), hashes, into)

    async def _load(self, paths: list[str], hashes: Sequence[bytes], into: Sequence[memoryview]) -> int:
        paths = paths[: self._index.leading(paths)]
        if not self._usable() or not paths or self._reads.admit() is Verdict.REFUSE:
            return 0
        nbytes = len(paths) * self._files.block_nbytes
        outcomes: list[str | None] = ["abandoned"] * len(paths)
        gate = Gate()
        lane = partial(self._read_lane, paths, hashes, into, gate, outcomes, count())
        self._due_nbytes += nbytes
        self._index.pin(paths)  # so that what is missing now was not evicted, nor stored again since
        try:
            with self._loading.running():
                lanes = [self._submit(lane) for _ in range(min(THREADS, len(paths)))]
                # one load may stand behind the other: as long as that one moves, the disk does
                self._report(await finish(lanes, self._stall_s, self._due_nbytes, lambda: self._reads_ended))
        except BaseException:
            self._reads.cancelled()
            raise
        finally:
            self._due_nbytes -= nbytes
            gate.close()
            self._index.unpin(paths)
        loaded = self._settle(paths, outcomes)
        self._load_nbytes += loaded * self._files.block_nbytes
        return loaded

    async def store(self, blocks: Sequence[tuple[bytes, memoryview]]) -> int:
        async with self._one_store:
            if not self._usable():
                self._dropped += len(blocks)
                return 0
            return await self._store.store([(self._files.path(h), h, payload) for h, payload in blocks])

    def pin(self, hashes: Sequence[bytes]) -> None:
        self._index.pin(self._paths(hashes))

    def unpin(self, hashes: Sequence[bytes]) -> None:
        self._index.unpin(self._paths(hashes))

    def stats(self) -> TierStats:
        store = self._store
        return TierStats(
            queries=self._queries,
            hits=self._hits,
            load_nbytes=self._load_nbytes,
            load_s=self._loading.seconds,
            store_nbytes=store.nbytes,
            store_s=store.seconds,
            evictions=self._evictions + store.evictions,
            corrupt=self._corrupt,
            dropped=self._dropped + store.dropped,
            errors=self._errors + store.errors,
            used_nbytes=self._index.used_nbytes,
            capacity_nbytes=self._index.capacity_nbytes,
            num_blocks=len(self._index),
            breaker=self._writes.state if self._reads.state == "closed" else self._reads.state,
        )

    async def close(self) -> None:
        self._ready, self._closed = False, True
        self._pool.close()
        last: list[Future[Any]] = [job for job in (self._opening, self._touching) if job is not None]
        if last:
            await asyncio.wait([asyncio.wrap_future(job) for job in last], timeout=self._stall_s)
        self._files.close()

    def _paths(self, hashes: Sequence[bytes]) -> list[str]:
        return [self._files.path(h) for h in hashes]

    def _changed(self, added: Sequence[str], removed: Sequence[str]) -> None:
        """On the loop; tells of our own namespace's blocks."""
        stored, evicted = self._files.hashes(added), self._files.hashes(removed)
        if stored or evicted:
            self._on_change(stored, evicted)

    def _submit(self, function: Callable[..., Any], *args: Any) -> asyncio.Future[Any]:
        return asyncio.wrap_future(self._pool.submit(function, *args))

    def _usable(self) -> bool:
        """Whether the directory can be used now. Takes up the end of an opening, and begins the next
        one once the directory was lost or could not be opened and the back-off is over."""
        if self._closed:
            return False
        if self._store.is_lost:
            self._store.is_lost = self._ready = False
            self._index.replace((), 0)  # until it is scanned anew
        if self._opening is not None and self._opening.done():
            self._take_up(self._opening)
            self._opening = None
        elif self._opening is None and not self._ready and self._writes.admit() is Verdict.PROBE:
            self._opening = self._pool.submit(self._files.open, self._index.capacity_nbytes)
        return self._ready

    def _take_up(self, opening: Future[Scan]) -> None:
        directory = str(self._files.directory)
        try:
            found = opening.result()
        except OSError as error:
            self._errors += 1
            if self._writes.failed():
                locked = isinstance(error, BlockingIOError)
                _log.warning(
                    "disk_tier.unusable",
                    directory=directory,
                    reason="another process uses it" if locked else error.strerror,
                    hint="give each worker on a host a directory of its own that it may write",
                )
            return
        self._index.replace(found.files, found.nbytes)
        self._store.directories = found.directories
        self._evictions += found.evicted
        self._writes.succeeded()
        self._ready = True
        _log.info(
            "disk_tier.opened",
            directory=directory,
            o_direct=self._files.direct,
            num_blocks=len(self._index),
            used_nbytes=self._index.used_nbytes,
            incomplete_dropped=found.dropped,
        )

    def _read_lane(
        self,
        paths: Sequence[str],
        hashes: Sequence[bytes],
        into: Sequence[memoryview],
        gate: Gate,
        outcomes: list[str | None],
        turns: count[int],
    ) -> None:
        """On a thread, one of several that take a load's blocks by turns, each until a block fails."""
        for i in turns:  # advancing a `count` is atomic, so each index goes to one lane
            if i >= len(paths) or not gate.is_open:
                return
            try:
                outcomes[i] = self._files.read(paths[i], hashes[i], into[i], gate)
            except OSError:
                outcomes[i] = "fault"
            self._reads_ended += 1
            if outcomes[i] is not None:
                return

    def _report(self, finished: bool) -> None:
        """Tell the breaker whether the disk answered in time."""
        if finished:
            self._reads.succeeded()
            return
        self._errors += 1
        if self._reads.failed():
            _log.warning(
                "disk_tier.stalled",
                directory=str(self._files.directory),
                stall_s=self._stall_s,
                hint="loads from disk are misses until it answers again",
            )

    def _settle(self, paths: Sequence[str], outcomes: Sequence[str | None]) -> int:
        """Note how the reads of a load went; returns how many leading blocks it brought."""
        for path, outcome in zip(paths, outcomes, strict=True):
            if outcome == "missing" or outcome not in _HARMLESS:
                self._index.refund(self._index.remove(path))
            if outcome not in _HARMLESS:
                self._corrupt += 1
                _log.warning("disk_tier.corrupt", file=path, mismatch=outcome)
        self._errors += outcomes.count("fault")
        loaded = next((i for i, outcome in enumerate(outcomes) if outcome is not None), len(paths))
        self._index.touch(paths[:loaded])
        self._touching = self._pool.submit(self._files.touch, paths[:loaded])
        return loaded
