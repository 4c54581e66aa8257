"""The prefill worker as a block source: ask, pull what it announces, verify, hand to the engine.

Whatever goes wrong here is a miss: the engine gets exactly one LoadFinished and computes the rest.
"""

from __future__ import annotations

import asyncio

import grpc

from core import log
from core.clock import monotonic
from core.errors import PeerLost, SourceFailed
from engine.messages import (
    BlocksArrived,
    Event,
    LoadCancelled,
    LoadFinished,
    LoadOrdered,
    LoadReport,
    Quiet,
)
from kvtransfer.leases import LeaseView
from kvtransfer.ledger import Ledger
from kvtransfer.puller import Puller
from kvtransfer.transport import PeerPool, ReadPending
from services.decode.peers import CONTROL_TIMEOUT_S, Peers, as_source_failure
from services.worker.host import WorkerHost
from wire import status
from wire.v1 import prefill_pb2 as pb
from wire.v1 import prefill_pb2_grpc

_log = log.get("decode")


class Loader:
    """All loads of one decode worker."""

    def __init__(self, host: WorkerHost) -> None:
        self._host = host
        self._ledger = Ledger(lambda block_ids: host.built.loop.submit(Quiet(tuple(block_ids))))
        self._puller = Puller(self._ledger)
        self._peers = Peers(host, self._puller)
        self._tasks: dict[str, asyncio.Task[None]] = {}

    def on_event(self, event: Event) -> None:
        """Takes LoadOrdered and LoadCancelled."""
        if isinstance(event, LoadOrdered):
            load = _Load(event)
            task = asyncio.create_task(self._load(load))
            self._tasks[event.request_id] = task
            # A callback, since a task that is cancelled before its first turn never enters its body.
            task.add_done_callback(lambda _: self._finish(load))
        elif isinstance(event, LoadCancelled) and (task := self._tasks.get(event.request_id)):
            task.cancel()

    async def close(self) -> None:
        for task in list(self._tasks.values()):
            task.cancel()
        await asyncio.gather(*self._tasks.values(), return_exceptions=True)
        await asyncio.sleep(0)  # the callbacks of the tasks
        await self._peers.close()
        self._puller.stop()
        await asyncio.to_thread(self._puller.close)

    async def _load(self, load: _Load) -> None:
        order = load.order
        try:
            async with asyncio.timeout(self._host.settings.request_timeout_s):
                await self._run(load)
        except SourceFailed as error:
            # A read that is only late keeps its connection: others may be reading over it.
            if isinstance(error, PeerLost) and not isinstance(error, ReadPending):
                self._peers.discard(order.target)
            self._failed(load, error)
        except TimeoutError:
            self._failed(load, SourceFailed("the load took longer than a request may"))
        except Exception as error:  # a fault of ours must not strand the blocks
            _log.error("load.broke", request_id=order.request_id, exc_info=error)
            self._failed(load, SourceFailed(f"{type(error).__name__} while loading"))

    def _failed(self, load: _Load, error: SourceFailed) -> None:
        load.error = f"{error.code}: {error.message}"
        self._host.metrics.transfer_failed(error.code or "unknown")
        target, request_id = load.order.target, load.order.request_id
        _log.warning("load.failed", request_id=request_id, peer=target.worker_id, reason=load.error)

    def _finish(self, load: _Load) -> None:
        """However the load ended, the engine hears of it once, with the blocks that are not quiet yet."""
        order = load.order
        self._tasks.pop(order.request_id, None)
        quiet = set(self._ledger.release(order.request_id, order.block_ids))
        unquiet = tuple(block_id for block_id in order.block_ids if block_id not in quiet)
        self._host.built.loop.submit(LoadFinished(order.request_id, load.report(unquiet)))
        if load.nbytes:
            self._host.metrics.transferred(load.nbytes, load.transfer_s)

    async def _run(self, load: _Load) -> None:
        order = load.order
        peer = await self._peers.connect(order.target)
        transfer_id = f"{self._host.worker_id}:{self._host.incarnation}:{order.request_id}"
        lease = LeaseView(monotonic)
        sent_at = monotonic()
        call = peer.stub.Run(
            pb.RunRequest(
                transfer_id=transfer_id,
                epoch=order.epoch,
                incarnation=order.target.incarnation,
                token_ids=order.token_ids,
                cache_salt=order.cache_salt,
                first_block=order.first_block,
            )
        )
        renewing: asyncio.Task[None] | None = None
        try:
            while load.arrived < len(order.block_ids):
                event = await self._next(call, order, renewing, lease)
                match event.WhichOneof("kind"):
                    case "accepted":
                        lease.renewed(sent_at, event.accepted.lease_s)
                        renewing = asyncio.create_task(
                            self._renew(peer.stub, transfer_id, order.epoch, lease)
                        )
                    case "started":
                        load.remote_cached_blocks = event.started.cached_blocks
                    case "ready":
                        await self._pull(load, peer.pool, event.ready, lease)
        except grpc.aio.AioRpcError as error:
            raise as_source_failure(error, order.target) from error
        finally:
            lease.revoke("the load is over")
            call.cancel()  # the stream's end is the release
            if renewing:
                renewing.cancel()

    async def _next(
        self,
        call: grpc.aio.UnaryStreamCall,
        order: LoadOrdered,
        renewing: asyncio.Task[None] | None,
        lease: LeaseView,
    ) -> pb.RunEvent:
        """The next announcement; a peer that is silent too long or renews no more is a miss."""
        reading = asyncio.ensure_future(call.read())
        awaited = {reading} if renewing is None else {reading, renewing}
        try:
            await asyncio.wait(
                awaited,
                timeout=self._host.settings.source_timeout_s,
                return_when=asyncio.FIRST_COMPLETED,
            )
            if not reading.done():
                if renewing is not None and renewing.done():
                    lease.check()  # says why it was revoked
                raise SourceFailed(f"{order.target.worker_id} announced nothing for too long")
            event = reading.result()
        finally:
            reading.cancel()
        if not isinstance(event, pb.RunEvent):  # the end of the stream
            raise PeerLost(f"{order.target.worker_id} ended the handoff early")
        return event

    async def _pull(self, load: _Load, pool: PeerPool, ready: pb.BlocksReady, lease: LeaseView) -> None:
        heard_at, order = monotonic(), load.order
        at = ready.first - order.first_block
        local_ids = order.block_ids[at : at + len(ready.block_ids)]
        if at != load.arrived or len(local_ids) != len(ready.block_ids):
            raise SourceFailed(f"{order.target.worker_id} announced blocks out of order")
        stats = await self._puller.pull(
            pool, list(ready.block_ids), local_ids, list(ready.checksums), lease, order.request_id
        )
        load.arrived += len(local_ids)
        load.nbytes += stats.nbytes
        load.transfer_s += stats.seconds
        load.last_block_at = heard_at - ready.age_s
        load.exposed_s = monotonic() - load.last_block_at
        self._host.built.loop.submit(BlocksArrived(order.request_id, load.arrived))

    async def _renew(
        self, stub: prefill_pb2_grpc.PrefillStub, transfer_id: str, epoch: int, lease: LeaseView
    ) -> None:
        """Keep the lease alive; returns when that fails, with the lease revoked."""
        while True:
            await asyncio.sleep(max(0.01, lease.renew_due()))
            sent_at = monotonic()
            request = pb.RenewRequest(transfer_id=transfer_id, epoch=epoch)
            timeout_s = min(CONTROL_TIMEOUT_S, lease.remaining())  # later, an answer is worth nothing
            try:
                reply = await stub.Renew(request, timeout=timeout_s)
            except grpc.aio.AioRpcError as error:
                lease.revoke(status.from_rpc(error, transfer_id).message)
                return
            lease.renewed(sent_at, reply.lease_s)


class _Load:
    """One order and what it has brought so far."""

    def __init__(self, order: LoadOrdered) -> None:
        self.order = order
        self.arrived = self.remote_cached_blocks = self.nbytes = 0
        self.transfer_s = self.exposed_s = 0.0
        self.last_block_at: float | None = None
        self.error = ""

    def report(self, unquiet: tuple[int, ...]) -> LoadReport:
        return LoadReport(
            arrived=self.arrived,
            remote_cached_blocks=self.remote_cached_blocks,
            nbytes=self.nbytes,
            transfer_s=self.transfer_s,
            exposed_s=self.exposed_s,
            last_block_at=self.last_block_at,
            error=self.error,
            unquiet=unquiet,
        )
