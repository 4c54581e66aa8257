"""Speed of the disk and Redis tiers against what lies below them, measured in turns: 128 blocks of 720 KiB
(2,048 tokens of the embedded model in fp32).

usage: PYTHONPATH=. python tests/kvtransfer/kv_tier_speed.py [DIRECTORY [ROUNDS]]
"""

import asyncio
import mmap
import os
import socket
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import uvloop
from redis.asyncio import Redis
from redis_process import RedisServer, free_port
from tier_blocks import NAMESPACE, blocks, hashes

from kvtransfer.disk_files import BlockFiles
from kvtransfer.disk_tier import THREADS, DiskTier
from kvtransfer.redis_tier import RedisTier

BLOCK_NBYTES = 720 * 1024
COUNT = 128
TOTAL_NBYTES = COUNT * BLOCK_NBYTES
CHAIN = blocks(COUNT, nbytes=BLOCK_NBYTES)

Way = Callable[[], Awaitable[object]]


async def compare(ways: dict[str, Way], rounds: int) -> None:
    """Time each way in turns, so that a noisy machine disturbs all alike; the first is the raw limit."""
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(rounds):
        for name, way in ways.items():
            started = time.perf_counter()
            await way()
            seconds[name].append(time.perf_counter() - started)
    raw = min(next(iter(seconds.values())))
    for name, took in seconds.items():
        median = sorted(took)[rounds // 2]
        print(
            f"{name:34s} best {TOTAL_NBYTES / min(took) / 1e9:5.2f} GB/s   "
            f"median {TOTAL_NBYTES / median / 1e9:5.2f} GB/s   {raw / min(took):5.0%} of the first"
        )


def read_plainly(paths: list[Path], buffer: mmap.mmap) -> None:
    for path in paths:
        fd = os.open(path, os.O_RDONLY | os.O_DIRECT)
        os.preadv(fd, [buffer], 0)
        os.close(fd)


async def disk(directory: Path, rounds: int) -> None:
    files = BlockFiles(directory, NAMESPACE, BLOCK_NBYTES)
    tier = DiskTier(files, 4 * TOTAL_NBYTES, stall_s=10.0)
    await tier.opened()
    started = time.perf_counter()
    assert await tier.store(CHAIN) == COUNT
    print(f"disk store, synced {TOTAL_NBYTES / (time.perf_counter() - started) / 1e9:20.2f} GB/s")
    paths = [directory / files.path(block_hash) for block_hash, _ in CHAIN]
    into = pool_blocks()
    pages = [mmap.mmap(-1, files.file_nbytes) for _ in range(THREADS)]
    threads = ThreadPoolExecutor(THREADS)

    async def plain() -> None:
        shares = [paths[i::THREADS] for i in range(THREADS)]
        loop = asyncio.get_running_loop()
        await asyncio.gather(
            *(loop.run_in_executor(threads, read_plainly, *job) for job in zip(shares, pages, strict=True))
        )

    async def load() -> None:
        assert await tier.load(hashes(CHAIN), into) == COUNT

    await compare({f"plain O_DIRECT reads, {THREADS} threads": plain, "disk load": load}, rounds)
    await tier.close()
    threads.shutdown()


async def redis(directory: Path, rounds: int) -> None:
    port = free_port()
    server = RedisServer(directory, port=port)
    try:
        tier = RedisTier(server.url, NAMESPACE, BLOCK_NBYTES, 3600, stall_s=10.0)
        started = time.perf_counter()
        assert await tier.store(CHAIN) == COUNT
        print(f"Redis store {TOTAL_NBYTES / (time.perf_counter() - started) / 1e9:27.2f} GB/s")
        into = pool_blocks()
        with server.client() as client:
            keys: list[bytes] = sorted(client.keys("*"))  # pyright: ignore[reportAssignmentType,reportArgumentType]
        plain_client = Redis.from_url(server.url)
        bare_socket = socket.create_connection(("127.0.0.1", port))
        buffer = bytearray(2**20)

        async def plain() -> None:
            for first in range(0, COUNT, 8):
                pipeline = plain_client.pipeline(transaction=False)
                for key in keys[first : first + 8]:
                    pipeline.get(key)
                await pipeline.execute()

        async def bare() -> None:
            bare_socket.sendall(
                b"".join(b"*2\r\n$3\r\nGET\r\n$%d\r\n%s\r\n" % (len(key), key) for key in keys)
            )
            left = COUNT * (len(f"${BLOCK_NBYTES + 128}\r\n") + BLOCK_NBYTES + 128 + 2)
            while left:
                left -= bare_socket.recv_into(buffer)

        async def load() -> None:
            assert await tier.load(hashes(CHAIN), into) == COUNT

        await compare(
            {"redis-py, pipelined GETs": plain, "bare socket, bytes thrown away": bare, "Redis load": load},
            rounds,
        )
        bare_socket.close()
        await plain_client.aclose()
        await tier.close()
    finally:
        server.stop()


def pool_blocks() -> list[memoryview]:
    """Buffers as a worker has them: one mapping whose pages exist already."""
    pool = memoryview(mmap.mmap(-1, TOTAL_NBYTES))
    pool[:] = bytes(TOTAL_NBYTES)
    return [pool[i : i + BLOCK_NBYTES] for i in range(0, TOTAL_NBYTES, BLOCK_NBYTES)]


async def main() -> None:
    rounds = int(sys.argv[2]) if len(sys.argv) > 2 else 10
    with tempfile.TemporaryDirectory(dir=sys.argv[1] if len(sys.argv) > 1 else None) as name:
        await disk(Path(name) / "disk", rounds)
        await redis(Path(name) / "redis", rounds)


uvloop.run(main())
