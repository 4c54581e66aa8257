"""A disk tier's directory as whoever holds its lock may go through it, whatever models its files are of."""

from __future__ import annotations

import fcntl
import os
import re
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

from kvtransfer.payload import HEADER_NBYTES, check_named, read_header

ALIGNMENT = 4096
"""Of file offsets, lengths and memory under O_DIRECT; enough for every logical block size in use."""

LOCK = ".lock"
_NAMESPACE = re.compile(r"[0-9a-f]{16}")
_FAN = re.compile(r"[0-9a-f]{2}")
_FILE = re.compile(r"[0-9a-f]{64}\.kv(\.tmp)?")


def lock(directory: Path) -> int:
    """The descriptor of a lock that ends with the process, so a worker finds its directory free after
    kill -9. Raises OSError: BlockingIOError when another process has it."""
    fd = os.open(directory / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(fd)
        raise
    return fd


def holder(directory: Path) -> int | None:
    """The process that has the lock, where the kernel tells us."""
    inode = (directory / LOCK).stat().st_ino
    for line in Path("/proc/locks").read_text().splitlines():
        fields = line.split()  # number, FLOCK, ADVISORY, WRITE, pid, device:inode, ...
        if len(fields) > 5 and fields[1] == "FLOCK" and fields[5].endswith(f":{inode}"):
            return int(fields[4]) if int(fields[4]) > 0 else None
    return None


def walk(directory: Path, directories: set[str]) -> Iterator[tuple[str, os.DirEntry[str]]]:
    """Files with names of ours, in all namespaces; what else lies there is left alone. `directories`
    gathers those that were gone through. Paths are relative to `directory`. Raises OSError."""
    for namespace in _subdirectories(directory, _NAMESPACE):
        directories.add(namespace)
        for fan in _subdirectories(directory / namespace, _FAN):
            directories.add(f"{namespace}/{fan}")
            with os.scandir(directory / namespace / fan) as entries:
                for entry in entries:
                    if _FILE.fullmatch(entry.name) and entry.is_file(follow_symlinks=False):
                        yield f"{namespace}/{fan}/{entry.name}", entry


def damage(directory: Path, path: str) -> str | None:
    """What is wrong with a file of whichever namespace, `path` as `walk` gives it; None when it is whole.

    Reads all of it. Raises OSError.
    """
    if path.endswith(".tmp"):
        return "incomplete"
    namespace, _, name = path.split("/")
    data = memoryview((directory / path).read_bytes())
    header = data[:HEADER_NBYTES]
    said = read_header(header)
    nbytes = said.payload_nbytes if said else 0
    if said and len(data) != ALIGNMENT + -(-nbytes // ALIGNMENT) * ALIGNMENT:
        return "length"
    block_hash = bytes.fromhex(PurePosixPath(name).stem)
    return check_named(header, bytes.fromhex(namespace), block_hash, data[ALIGNMENT : ALIGNMENT + nbytes])


def _subdirectories(parent: Path, pattern: re.Pattern[str]) -> list[str]:
    with os.scandir(parent) as entries:
        return [e.name for e in entries if pattern.fullmatch(e.name) and e.is_dir(follow_symlinks=False)]
