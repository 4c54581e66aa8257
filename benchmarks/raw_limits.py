"""What memory, disk and a Redis give to a program that does nothing else: limits of the tiers above them.

Each is measured with the bytes that a tier moves, in pieces of one block, on the cores that the worker has.
"""

from __future__ import annotations

import mmap
import os
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from kvtransfer.disk_tier import THREADS

_RECEIVE_NBYTES = 2**20


@contextmanager
def on_cores(cores: Sequence[int]) -> Iterator[None]:
    """This thread, and those that it starts meanwhile, on these cores."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cores)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def memcpy(num_blocks: int, block_nbytes: int) -> float:
    """Bytes per second from one mapping to another, block by block."""
    nbytes = num_blocks * block_nbytes
    source, target = (np.frombuffer(mmap.mmap(-1, nbytes), np.uint8).reshape(num_blocks, -1) for _ in "st")
    source[:], target[:] = 1, 0  # so that the pages exist

    def copy() -> None:
        for from_, to in zip(source, target, strict=True):
            np.copyto(to, from_)

    return nbytes / _seconds(copy)


def direct_reads(paths: Sequence[Path]) -> float:
    """Bytes per second of O_DIRECT reads of whole files on as many threads as the disk tier has."""
    nbytes = sum(path.stat().st_size for path in paths)
    pages = [mmap.mmap(-1, max(path.stat().st_size for path in paths)) for _ in range(THREADS)]

    def read(lane: int) -> None:
        for path in paths[lane::THREADS]:
            fd = os.open(path, os.O_RDONLY | os.O_DIRECT)
            try:
                os.preadv(fd, [pages[lane]], 0)
            finally:
                os.close(fd)

    with ThreadPoolExecutor(THREADS) as threads:
        return nbytes / _seconds(lambda: list(threads.map(read, range(THREADS))))


def redis_gets(address: tuple[str, int], keys: Sequence[bytes], value_nbytes: int) -> float:
    """Bytes per second of GETs in one pipeline on a bare socket; what comes is thrown away."""
    with socket.create_connection(address) as connection:
        buffer = bytearray(_RECEIVE_NBYTES)
        asked = b"".join(b"*2\r\n$3\r\nGET\r\n$%d\r\n%s\r\n" % (len(key), key) for key in keys)
        answered_nbytes = len(keys) * (len(f"${value_nbytes}\r\n") + value_nbytes + 2)

        def get() -> None:
            connection.sendall(asked)
            left = answered_nbytes
            while left:
                left -= connection.recv_into(buffer)

        return len(keys) * value_nbytes / _seconds(get)


def _seconds(way: Callable[[], object]) -> float:
    started = time.perf_counter()
    way()
    return time.perf_counter() - started
