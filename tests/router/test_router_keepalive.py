"""A peer that stops without a word (frozen, unplugged) is noticed, by both ends of the connection."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import grpc
import pytest
from router_fakes import FakeWorker, fingerprint

from wire import channel
from wire.v1 import worker_pb2 as pb
from wire.v1 import worker_pb2_grpc as pb_grpc

SLACK_S = 2.0

PEER = """
import asyncio, sys
from router_fakes import FakeWorker, fingerprint
from wire import channel
from wire.v1 import worker_pb2 as pb
from wire.v1 import worker_pb2_grpc as pb_grpc

async def main():
    print(await FakeWorker(fingerprint("t")).start(), flush=True)
    async for _ in pb_grpc.WorkerStub(channel.connect(sys.argv[1])).Watch(pb.WatchRequest()):
        pass

asyncio.run(main())
"""


class WatchedWorker(FakeWorker):
    """Notes when its watcher came and went."""

    def __init__(self) -> None:
        super().__init__(fingerprint("t"))
        self.came, self.gone = asyncio.Event(), asyncio.Event()

    async def Watch(self, request, context):
        self.came.set()
        try:
            async for event in super().Watch(request, context):
                yield event
        finally:
            self.gone.set()


async def read_all(events: AsyncIterator[pb.WatchEvent]) -> None:
    async for _ in events:
        pass


@pytest.mark.slow
async def test_a_stopped_peer_is_noticed_by_both_ends():
    """1. We watch a process, it watches us.  2. It is stopped: its sockets live on, silently.
    3. Within about twice KEEPALIVE_S our call fails, and so does the one that it made to us."""
    worker = WatchedWorker()
    path = os.pathsep.join([str(Path(__file__).parent), *sys.path])
    peer = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", PEER, await worker.start()),
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": path},
    )
    try:
        assert peer.stdout is not None
        async with asyncio.timeout(20):
            address = (await peer.stdout.readline()).decode().strip()
            connection = channel.connect(address)
            events = aiter(pb_grpc.WorkerStub(connection).Watch(pb.WatchRequest()))
            await anext(events)
            await worker.came.wait()
        peer.send_signal(signal.SIGSTOP)
        async with asyncio.timeout(2 * channel.KEEPALIVE_S + SLACK_S):
            with pytest.raises(grpc.aio.AioRpcError):
                await read_all(events)
            await worker.gone.wait()
        await connection.close()
    finally:
        peer.kill()
        await peer.wait()
        await worker.stop()
