"""blake3 over files."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from blake3 import blake3


def _hash(file: Path) -> blake3:
    return blake3(max_threads=blake3.AUTO).update_mmap(file)


def file_digest(file: Path) -> str:
    """Hex blake3 of one file, mapped and hashed on all cores."""
    return _hash(file).hexdigest()


def files_digest(files: Sequence[Path]) -> str:
    """Hex blake3 over the names and contents of several files, in the given order."""
    total = blake3()
    for file in files:
        name = file.name.encode()
        total.update(len(name).to_bytes(4, "little") + name + _hash(file).digest())
    return total.hexdigest()
