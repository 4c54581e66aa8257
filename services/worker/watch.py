"""Worker.Watch: tells routers who this worker is and how it fares."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import AsyncIterator, Callable

import grpc

from core.errors import BatonError, Overloaded
from kvtransfer.tier_stack import TierStack
from services.version import VERSION
from services.worker.host import WorkerHost
from wire import status
from wire.codec import fingerprint_to_wire, step_model_to_wire
from wire.v1 import worker_pb2 as pb
from wire.v1 import worker_pb2_grpc

STATE_EVERY_S = 1.0
MAX_WATCHERS = 256
STATE_NOT_BEFORE_S = 0.05


class WatchService(worker_pb2_grpc.WorkerServicer):
    """Hello, then State and KvEvents on every change of the engine's, at most each 50 ms, and at least each
    second: that is how old news of the tiers may be."""

    def __init__(self, host: WorkerHost, change_role: Callable[[str], None]) -> None:
        """`change_role` begins a change; raises BatonError."""
        self._host, self._change_role = host, change_role
        host.listeners.append(self.wake)
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
        if len(self._watchers) >= MAX_WATCHERS:
            await status.abort(context, Overloaded(f"{MAX_WATCHERS} routers watch this worker already"))
        wake = asyncio.Event()
        self._watchers.add(wake)
        try:
            told_role, cursor, taken_cursor = "", None, 0
            while not self._closed:
                wake.clear()
                if self._host.role != told_role:
                    told_role, cursor = self._host.role, None  # a Hello begins with all blocks
                    yield pb.WatchEvent(hello=self._hello())
                state = self._state()
                state.taken[:], taken_cursor = self._host.taken.since(taken_cursor)
                yield pb.WatchEvent(state=state)
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

    async def SetRole(self, request: pb.SetRoleRequest, context: grpc.aio.ServicerContext) -> pb.SetRoleReply:
        try:
            self._change_role(request.role)
        except BatonError as error:
            await status.abort(context, error)
        return pb.SetRoleReply()

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
            max_num_seqs=built.limits.max_num_seqs,
            max_num_batched_tokens=built.limits.max_num_batched_tokens,
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
            step_s=loop.step_s,
            tiers=tier_states(built.stack, built.fingerprint.block_size) if built.stack else (),
            prefill_model=step_model_to_wire(stats.prefill_model),
            decode_model=step_model_to_wire(stats.decode_model),
            queued_tokens=stats.queued_tokens,
            context_tokens=stats.context_tokens,
            links=[pb.Link(peer=peer, nbytes_per_s=rate) for peer, rate in self._host.links.rates().items()],
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
