"""Worker.Watch: tells routers who this worker is and how it fares."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import AsyncIterator

import grpc

from kvtransfer.tier_stack import TierStack
from services.version import VERSION
from services.worker.host import WorkerHost
from wire.codec import fingerprint_to_wire
from wire.v1 import worker_pb2 as pb
from wire.v1 import worker_pb2_grpc

STATE_EVERY_S = 1.0
STATE_NOT_BEFORE_S = 0.05


class WatchService(worker_pb2_grpc.WorkerServicer):
    """Hello, then State and KvEvents on every change of the engine's, at most each 50 ms, and at least each
    second: that is how old news of the tiers may be."""

    def __init__(self, host: WorkerHost) -> None:
        self._host = host
        self._loop = asyncio.get_running_loop()
        self._watchers: set[asyncio.Event] = set()
        self._closed = False

    def changed(self) -> None:
        """Called on the engine's thread."""
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self.wake)

    def wake(self) -> None:
        for event in self._watchers:
            event.set()

    def close(self) -> None:
        """End all streams: the worker is leaving."""
        self._closed = True
        self.wake()

    async def Watch(
        self, request: pb.WatchRequest, context: grpc.aio.ServicerContext
    ) -> AsyncIterator[pb.WatchEvent]:
        wake = asyncio.Event()
        self._watchers.add(wake)
        try:
            yield pb.WatchEvent(hello=self._hello())
            cursor = None
            while not self._closed:
                wake.clear()
                yield pb.WatchEvent(state=self._state())
                events, cursor = self._host.kv_events.since(cursor)
                if events is not None:
                    yield pb.WatchEvent(kv=events)
                await asyncio.sleep(STATE_NOT_BEFORE_S)
                try:
                    await asyncio.wait_for(wake.wait(), STATE_EVERY_S)
                except TimeoutError:
                    continue  # nothing changed; a State is due all the same
        finally:
            self._watchers.discard(wake)

    def _hello(self) -> pb.Hello:
        host, built = self._host, self._host.built
        return pb.Hello(
            worker_id=host.worker_id,
            incarnation=host.incarnation,
            role=host.role,
            fingerprint=fingerprint_to_wire(built.fingerprint),
            host=socket.gethostname(),
            pid=os.getpid(),
            address=host.address,
            probe_address=host.probe_address,
            transports=built.ranks.transports,
            total_blocks=built.footprint.num_blocks,
            dtype=built.footprint.dtype,
            version=VERSION,
        )

    def _state(self) -> pb.State:
        built = self._host.built
        loop, stats = built.loop, built.loop.stats
        return pb.State(
            phase=str(self._host.phase),
            free_blocks=stats.free_blocks,
            cached_blocks=stats.cached_blocks,
            running=stats.running,
            waiting=stats.waiting,
            loading=stats.loading,
            held=stats.held,
            steps=stats.steps,
            idle_s=loop.idle_s,
            prefill_token_s=stats.prefill_token_s,
            tiers=tier_states(built.stack, built.fingerprint.block_size) if built.stack else (),
        )


def tier_states(stack: TierStack, block_size: int) -> list[pb.TierState]:
    """What routers are told of each tier."""
    return [
        pb.TierState(
            tier=name,
            token_s=stack.host.block_nbytes / stack.rate(name).nbytes_per_s / block_size,
            used_bytes=stats.used_nbytes,
            capacity_bytes=stats.capacity_nbytes,
            blocks=stats.num_blocks,
            hit_blocks=stats.hits,
            breaker=stats.breaker,
        )
        for name, stats in stack.stats().items()
    ]
