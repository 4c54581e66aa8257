"""The files of the disk tier; everything here blocks and runs on the tier's threads.

    DIRECTORY/.lock                                   held by the one process that uses the directory
    DIRECTORY/<namespace, 16 hex>/<2 hex>/<hash, 64 hex>.kv
    DIRECTORY/<namespace, 16 hex>/<2 hex>/<hash, 64 hex>.kv.tmp     being written

A file is one page with the header, then the payload, zero-padded to whole pages, so that it can be read
and written with O_DIRECT. It is written under its temporary name, synced and renamed, so what carries
the final name is complete. Directories are not synced: a rename lost in a power cut is a miss, no more.
KV gives prompts away, so nobody but the owner may read it.
"""

from __future__ import annotations

import errno
import mmap
import os
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath

from kvtransfer.disk_walk import ALIGNMENT, lock, walk
from kvtransfer.gate import Gate
from kvtransfer.payload import HEADER_NBYTES, check, encode_header

DIRECTORY_NBYTES = 4096
"""What one directory is charged with; it grows by a page per 50 files or so, under 0.1% of those."""

KEEP_FREE_NBYTES = 2**30
KEEP_FREE_SHARE = 0.05
"""The smaller of the two is left free on the file system: a full disk hurts more than a miss."""


@dataclass
class Scan:
    """What a directory held when it was opened."""

    files: list[tuple[str, int]] = field(default_factory=list)
    """(path, bytes), least recently used first."""
    directories: set[str] = field(default_factory=set)
    dropped: int = 0
    """Incomplete files and files of a size that no block of this namespace has; they were deleted."""
    evicted: int = 0
    """Files beyond the cap; they were deleted."""

    @property
    def nbytes(self) -> int:
        return sum(nbytes for _, nbytes in self.files) + len(self.directories) * DIRECTORY_NBYTES


class BlockFiles:
    """Files of one namespace under `directory`, payloads of `block_nbytes`. Used by several threads."""

    def __init__(self, directory: str | Path, namespace: bytes, block_nbytes: int) -> None:
        self.directory = Path(directory)
        self._namespace = namespace
        self.block_nbytes = block_nbytes
        self.file_nbytes = ALIGNMENT + -(-block_nbytes // ALIGNMENT) * ALIGNMENT
        self.direct = False
        self._staging = threading.local()
        self._lock_fd = -1
        self._directory_id: tuple[int, int] | None = None

    def path(self, block_hash: bytes) -> str:
        name = block_hash.hex()
        return f"{self._namespace[:8].hex()}/{name[:2]}/{name}.kv"

    def hashes(self, paths: Sequence[str]) -> list[bytes]:
        """The blocks of this namespace among these files, as `path` names them."""
        ours = f"{self._namespace[:8].hex()}/"
        return [bytes.fromhex(PurePosixPath(path).stem) for path in paths if path.startswith(ours)]

    def open(self, capacity_nbytes: int) -> Scan:
        """Lock the directory, find out about O_DIRECT, and list what is there, trimmed to the cap.

        The first call creates the directory; a later one does not: where it is gone, so may be its
        mount, and the cache must not fill the disk below. Raises OSError: BlockingIOError when another
        process uses the directory.
        """
        if self._directory_id is None:
            self.directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._lock()
        stat = self.directory.stat()
        self._directory_id = stat.st_dev, stat.st_ino
        self.direct = self._accepts_direct()
        found = self._scan()
        nbytes, keep_from = found.nbytes, 0
        while nbytes > capacity_nbytes and keep_from < len(found.files):
            path, size = found.files[keep_from]
            self.delete(path)
            nbytes, keep_from = nbytes - size, keep_from + 1
        found.files, found.evicted = found.files[keep_from:], keep_from
        return found

    def is_current(self) -> bool:
        """Whether the directory is still the one that was opened, not deleted, replaced or unmounted."""
        try:
            stat = self.directory.stat()
        except OSError:
            return False
        return self._directory_id == (stat.st_dev, stat.st_ino)

    def spare_nbytes(self) -> int:
        """Bytes that may still be written to the file system above its watermark; may be negative."""
        stat = os.statvfs(self.directory)
        watermark = min(KEEP_FREE_NBYTES, int(stat.f_blocks * stat.f_frsize * KEEP_FREE_SHARE))
        return stat.f_bavail * stat.f_frsize - watermark

    def read(self, path: str, block_hash: bytes, into: memoryview, gate: Gate) -> str | None:
        """Read and verify one block; None when `into` holds it, else why not: `missing`, `abandoned`,
        or what is wrong with the file, which is then deleted. Raises OSError for faults of the disk.

        Goes through a buffer of this thread: `into` may have any alignment, never sees a damaged
        byte, and is not written any more once the caller has closed the gate.
        """
        staging = self._buffer()
        try:
            fd = os.open(self.directory / path, os.O_RDONLY | os.O_CLOEXEC | self._direct_flag)
        except (FileNotFoundError, NotADirectoryError):
            return "missing"
        try:
            nbytes = os.preadv(fd, [staging], 0)
            whole = nbytes == self.file_nbytes == os.fstat(fd).st_size
        except OSError as error:
            if error.errno != errno.EIO:
                raise
            whole = False  # a bad sector: as good as damaged
        finally:
            os.close(fd)
        payload = staging[ALIGNMENT : ALIGNMENT + self.block_nbytes]
        header = staging[:HEADER_NBYTES]
        damage = check(header, self._namespace, block_hash, payload) if whole else "length"
        if damage:
            self.delete(path)
            return damage
        return None if gate.copy(into, payload) else "abandoned"

    def write(self, path: str, block_hash: bytes, payload: memoryview, gate: Gate, used_ns: int) -> bool:
        """Write one file and give it its name; False when the caller left before that.

        `used_ns`: the file's time, by which a later scan orders. Raises OSError; nothing is left then.
        """
        staging = self._buffer()
        body = staging[ALIGNMENT : ALIGNMENT + self.block_nbytes]
        if not gate.copy(body, payload):
            return False
        staging[:HEADER_NBYTES] = encode_header(self._namespace, block_hash, body)
        staging[HEADER_NBYTES:ALIGNMENT] = bytes(ALIGNMENT - HEADER_NBYTES)
        staging[ALIGNMENT + self.block_nbytes :] = bytes(len(staging) - ALIGNMENT - self.block_nbytes)
        target = self.directory / path
        with self._temporary(target) as (name, fd):
            _write_all(fd, staging)
            os.fdatasync(fd)
            os.utime(fd, ns=(used_ns, used_ns))
            in_time = gate.is_open
            if in_time:
                os.rename(name, target)
        return in_time

    def touch(self, paths: Sequence[str]) -> None:
        """Note a use, in chain order, for the order of a later scan; the head counts as youngest."""
        now = time.time_ns()
        for i, path in enumerate(paths):
            with suppress(OSError):  # gone, or a read-only file system: the order is only a hint
                os.utime(self.directory / path, ns=(now - i * 1000, now - i * 1000))

    def delete(self, path: str) -> bool:
        """Whether it is gone now."""
        try:
            os.unlink(self.directory / path)
        except (FileNotFoundError, NotADirectoryError):
            return True
        except OSError:
            return False
        return True

    def close(self) -> None:
        """Idempotent; another process may use the directory afterwards."""
        fd, self._lock_fd = self._lock_fd, -1
        if fd >= 0:
            os.close(fd)

    @property
    def _direct_flag(self) -> int:
        return os.O_DIRECT if self.direct else 0

    def _buffer(self) -> memoryview:
        """This thread's page-aligned buffer of `file_nbytes`."""
        if not hasattr(self._staging, "view"):
            self._staging.view = memoryview(mmap.mmap(-1, self.file_nbytes))
        return self._staging.view

    def _lock(self) -> None:
        self.close()
        self._lock_fd = lock(self.directory)

    def _accepts_direct(self) -> bool:
        probe = self.directory / ".probe"
        page = mmap.mmap(-1, ALIGNMENT)
        try:
            fd = os.open(probe, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC | os.O_DIRECT, 0o600)
            try:
                os.pwrite(fd, page, 0)
            finally:
                os.close(fd)
        except OSError as error:
            if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP):
                raise
            return False
        finally:
            with suppress(OSError):
                os.unlink(probe)
        return True

    def _scan(self) -> Scan:
        found = Scan(directories={"."})
        dated: list[tuple[int, str, int]] = []
        for path, entry in walk(self.directory, found.directories):
            try:
                stat = entry.stat(follow_symlinks=False)
            except FileNotFoundError:
                continue
            ours = path.startswith(self._namespace[:8].hex())
            if path.endswith(".tmp") or (ours and stat.st_size != self.file_nbytes):
                found.dropped += self.delete(path)
            else:
                dated.append((stat.st_mtime_ns, path, stat.st_size))
        found.files = [(path, nbytes) for _, path, nbytes in sorted(dated)]
        return found

    @contextmanager
    def _temporary(self, target: Path) -> Iterator[tuple[str, int]]:
        """(name, descriptor) of a new file beside `target`; gone afterwards unless it was renamed."""
        name = f"{target}.tmp"
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | self._direct_flag
        try:
            fd = os.open(name, flags, 0o600)
        except FileNotFoundError:
            self._make_directories(target)
            fd = os.open(name, flags, 0o600)
        try:
            yield name, fd
        finally:
            os.close(fd)
            with suppress(OSError):
                os.unlink(name)

    def _make_directories(self, target: Path) -> None:
        """The two levels above `target`; never the tier's directory itself, see `open`."""
        for directory in (target.parent.parent, target.parent):
            with suppress(FileExistsError):
                os.mkdir(directory, 0o700)


def _write_all(fd: int, view: memoryview) -> None:
    """A full disk may first show as a short write."""
    offset = 0
    while offset < len(view):
        offset += os.pwritev(fd, [view[offset:]], offset)
