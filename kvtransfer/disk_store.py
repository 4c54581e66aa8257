"""Storing on disk: making room, writing groups of blocks, and giving up for a while when that fails."""

from __future__ import annotations

import asyncio
import errno
import os
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import TypeVar

from core import log
from core.clock import monotonic
from kvtransfer.breaker import Breaker, Verdict
from kvtransfer.disk_files import DIRECTORY_NBYTES, BlockFiles
from kvtransfer.disk_index import DiskIndex
from kvtransfer.gate import Gate

WRITES_AT_ONCE = 3
"""One less than the tier has threads, so that a load always finds one that is not behind a sync."""

STALL_S = 10.0
"""For one group of writes. Nobody waits for a store but the next one, and a sync may take long."""

_FULL = (errno.ENOSPC, errno.EDQUOT)

_log = log.get("kvtransfer")

Block = tuple[str, bytes, memoryview]
"""(path, hash, payload)"""

T = TypeVar("T")
Submit = Callable[..., asyncio.Future]
"""Runs a function on one of the tier's threads."""


class DiskStore:
    """Fills `index` and the directory; one call of `store` at a time. A full disk or any other fault
    opens `writes`, and stores are dropped until its back-off is over."""

    def __init__(self, files: BlockFiles, index: DiskIndex, writes: Breaker, submit: Submit) -> None:
        self._files = files
        self._index = index
        self._writes = writes
        self._submit = submit
        self.directories: set[str] = set()
        """Those charged so far, relative to the tier's own."""
        self.is_lost = False
        """The directory was deleted or replaced, or hung, and must be opened and scanned anew."""
        self.nbytes = self.evictions = self.dropped = self.errors = 0
        self.seconds = 0.0

    async def store(self, blocks: Sequence[Block]) -> int:
        """Write what is not held yet; returns how many of `blocks` are held now."""
        new = list({block[0]: block for block in blocks if block[0] not in self._index}.values())
        used_ns = time.time_ns()
        for start in range(0, len(new), WRITES_AT_ONCE):
            if self.is_lost or self._writes.admit() is Verdict.REFUSE:
                break
            started = monotonic()
            await self._store_group(new[start : start + WRITES_AT_ONCE], used_ns - start * 1000)
            self.seconds += monotonic() - started
        self._index.touch([path for path, _, _ in blocks])
        held = sum(path in self._index for path, _, _ in blocks)
        self.dropped += len(blocks) - held
        return held

    async def _store_group(self, group: Sequence[Block], used_ns: int) -> None:
        """Store up to WRITES_AT_ONCE blocks and tell the breaker how it went, whatever happens."""
        error: OSError | None = None
        has_room = False
        try:
            if has_room := await self._make_room(group):
                error = await self._write(group, used_ns)
            if error is not None and error.errno in _FULL:
                rest = [block for block in group if block[0] not in self._index]
                if await self._make_room(rest, at_least_nbytes=len(rest) * self._files.file_nbytes):
                    error = await self._write(rest, used_ns)
        except OSError as fault:
            error = fault
        except BaseException:
            self._writes.cancelled()
            raise
        if error is not None:
            await self._fail(error)
        elif not has_room:
            self._writes.cancelled()  # nothing was written, which says nothing about the disk
        elif self._writes.succeeded():
            _log.info("disk_tier.stores_resumed", directory=str(self._files.directory))

    async def _make_room(self, group: Sequence[Block], at_least_nbytes: int = 0) -> bool:
        """Evict, `at_least_nbytes` in any case, until the group fits under the cap and above the watermark.

        False when pinned files leave no room under the cap. Raises OSError when the file system has
        none, or does not let go of a file.
        """
        need = self._need(group)
        if self._index.victims(need) is None:
            return False
        shortfall = need - await self._bounded(self._files.spare_nbytes)
        victims = self._index.victims(need, max(shortfall, at_least_nbytes))
        if victims is None:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        sizes = [self._index.remove(path) for path in victims]
        gone = await self._bounded(lambda: [self._files.delete(path) for path in victims])
        for path, nbytes, deleted in zip(victims, sizes, gone, strict=True):
            if deleted:
                self._index.refund(nbytes)
                self.evictions += 1
            else:
                self._index.restore(path, nbytes)
        if not all(gone):
            raise OSError(errno.EACCES, f"cannot delete {victims[gone.index(False)]}")
        return True

    def _need(self, group: Sequence[Block]) -> int:
        return len(group) * self._files.file_nbytes + len(self._fresh(group)) * DIRECTORY_NBYTES

    def _fresh(self, group: Sequence[Block]) -> set[str]:
        """Directories that these files need and that are not charged yet."""
        fans = {os.path.dirname(path) for path, _, _ in group}
        return (fans | {os.path.dirname(fan) for fan in fans}) - self.directories

    async def _write(self, group: Sequence[Block], used_ns: int) -> OSError | None:
        """Write side by side; returns the first error. What was written is in the index."""
        fresh = self._fresh(group)
        self._index.charge(len(fresh) * DIRECTORY_NBYTES)
        self.directories |= fresh
        gate = Gate()
        jobs = []
        for i, (path, block_hash, payload) in enumerate(group):
            self._index.begin_write(self._files.file_nbytes)
            # chain order in time, the head youngest, as in DiskIndex.touch
            job = self._submit(self._files.write, path, block_hash, payload, gate, used_ns - i * 1000)
            job.add_done_callback(partial(self._written, path))
            jobs.append(job)
        try:
            _, pending = await asyncio.wait(jobs, timeout=STALL_S)
        finally:
            gate.close()
        if pending:
            raise TimeoutError(_hung())
        return next((e for job in jobs if isinstance(e := job.exception(), OSError)), None)

    def _written(self, path: str, job: asyncio.Future[bool]) -> None:
        """A write ended, perhaps long after its caller left: only now its bytes are surely gone or there."""
        written = not job.cancelled() and job.exception() is None and job.result()
        self._index.end_write(path, self._files.file_nbytes, written=written)
        self.nbytes += self._files.block_nbytes * written

    async def _fail(self, error: OSError) -> None:
        self.errors += 1
        if self._writes.failed():
            _log.warning(
                "disk_tier.stores_stopped",
                directory=str(self._files.directory),
                reason=error.strerror or str(error) or type(error).__name__,
                hint="blocks are not stored on disk until it has room and can be written again",
            )
        if error.errno in _FULL:
            return
        try:
            self.is_lost = isinstance(error, TimeoutError) or not await self._bounded(self._files.is_current)
        except TimeoutError:
            self.is_lost = True

    async def _bounded(self, function: Callable[[], T]) -> T:
        """Its result from a thread. Raises OSError: its own, or TimeoutError when the disk hangs; what it
        was doing is then known only after the directory was opened anew."""
        job = self._submit(function)
        await asyncio.wait([job], timeout=STALL_S)
        if not job.done():
            raise TimeoutError(_hung())
        return job.result()


def _hung() -> str:
    return f"the disk did not answer within {STALL_S:g} s"
