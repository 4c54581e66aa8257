"""A disk tier's directory as tests see it, and files that can be made to fail."""

import os
import threading
import time
from pathlib import Path

from tier_blocks import BLOCK_NBYTES, NAMESPACE, Block

from kvtransfer.disk_files import DIRECTORY_NBYTES, BlockFiles
from kvtransfer.gate import Gate

FILE_NBYTES = BlockFiles(Path("/"), NAMESPACE, BLOCK_NBYTES).file_nbytes
DIRECTORIES_NBYTES = 4 * DIRECTORY_NBYTES  # the tier's own, the namespace's, two below it
CAP = 100 * FILE_NBYTES


class Clumsy(BlockFiles):
    """Real files whose writes can be made to fail, or to hang together with reads, which can be slow."""

    def __init__(self, directory: Path, namespace: bytes = NAMESPACE) -> None:
        super().__init__(directory, namespace, BLOCK_NBYTES)
        self.failures: list[int] = []
        self.read_s = 0.0
        self.free = threading.Event()
        self.free.set()

    def write(self, path: str, block_hash: bytes, payload: memoryview, gate: Gate, used_ns: int) -> bool:
        self.free.wait(20)
        if self.failures:
            number = self.failures.pop()
            raise OSError(number, os.strerror(number))
        return super().write(path, block_hash, payload, gate, used_ns)

    def spare_nbytes(self) -> int:
        self.free.wait(20)
        return super().spare_nbytes()

    def read(self, path: str, block_hash: bytes, into: memoryview, gate: Gate) -> str | None:
        self.free.wait(20)
        time.sleep(self.read_s)
        return super().read(path, block_hash, into, gate)


def file_of(directory: Path, block: Block) -> Path:
    return directory / BlockFiles(directory, NAMESPACE, BLOCK_NBYTES).path(block[0])


def files_in(directory: Path) -> list[Path]:
    return [path for path in directory.rglob("*.kv*") if path.is_file()]


def du(directory: Path) -> int:
    """Bytes that the directory takes on disk, directories included."""
    every = [directory, *directory.rglob("*")]
    return sum(path.stat().st_blocks * 512 for path in every)
