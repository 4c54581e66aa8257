"""The prefill worker as a block source: ask, pull what it announces, verify, hand to the engine.

Whatever goes wrong here is a miss: the engine gets exactly one LoadFinished and computes the rest.
"""

from __future__ import annotations

import asyncio

import grpc

from core import log
from core.clock import monotonic
from core.errors import BatonError, PeerLost, SourceFailed
from core.request import PrefillTarget
from engine.messages import (
    BlocksArrived,
    Event,
    LoadCancelled,
    LoadFinished,
    LoadOrdered,
    LoadReport,
    Quiet,
)
from kvtransfer.handshake import PeerBook, check
from kvtransfer.leases import LeaseView
from kvtransfer.ledger import Ledger
from kvtransfer.puller import Puller
from kvtransfer.transport import PeerPool, Transport, choose
from services.worker.host import WorkerHost
from wire import channel, status
from wire.codec import fingerprint_from_wire, fingerprint_to_wire
from wire.v1 import prefill_pb2 as pb
from wire.v1 import prefill_pb2_grpc

_log = log.get("decode")

CONTROL_TIMEOUT_S = 5.0
"""Bound of Connect and Renew: small calls that compute nothing."""

MAX_PEERS = 256


class Loader:
    """All loads of one decode worker."""

    def __init__(self, host: WorkerHost) -> None:
        self._host = host
        self._ledger = Ledger(lambda block_ids: host.built.loop.submit(Quiet(tuple(block_ids))))
        self._puller = Puller(self._ledger)
        self._transports: dict[str, Transport] = {t.name: t for t in host.built.transports}
        self._peers = PeerBook(self._puller.retire, limit=MAX_PEERS)
        self._channels: dict[str, grpc.aio.Channel] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}

    def on_event(self, event: Event) -> None:
        """Takes LoadOrdered and LoadCancelled."""
        if isinstance(event, LoadOrdered):
            task = asyncio.create_task(self._load(event))
            self._tasks[event.request_id] = task
            task.add_done_callback(lambda _: self._tasks.pop(event.request_id, None))
        elif isinstance(event, LoadCancelled) and (task := self._tasks.get(event.request_id)):
            task.cancel()

    async def close(self) -> None:
        for task in list(self._tasks.values()):
            task.cancel()
        await asyncio.gather(*self._tasks.values(), return_exceptions=True)
        self._peers.close()
        await asyncio.to_thread(self._puller.close)
        for open_channel in self._channels.values():
            await open_channel.close()

    async def _load(self, order: LoadOrdered) -> None:
        load = _Load()
        try:
            async with asyncio.timeout(self._host.settings.request_timeout_s):
                await self._run(order, load)
        except asyncio.CancelledError:
            load.error = "cancelled"
        except SourceFailed as error:
            self._failed(order, load, error)
        except TimeoutError:
            self._failed(order, load, PeerLost("the load took longer than a request may"))
        except Exception as error:  # a fault of ours must not strand the blocks
            _log.error("load.broke", request_id=order.request_id, exc_info=error)
            self._failed(order, load, PeerLost(f"{type(error).__name__} while loading"))
        finally:
            quiet = set(self._ledger.release(order.request_id, order.block_ids))
            unquiet = tuple(block_id for block_id in order.block_ids if block_id not in quiet)
            self._host.built.loop.submit(LoadFinished(order.request_id, load.report(unquiet)))
        if load.nbytes:
            self._host.metrics.transferred(load.nbytes, load.transfer_s)

    def _failed(self, order: LoadOrdered, load: _Load, error: BatonError) -> None:
        if isinstance(error, PeerLost):
            self._peers.discard(order.target.worker_id, order.target.incarnation)
        load.error = f"{error.code}: {error.message}"
        self._host.metrics.transfer_failed(error.code or "unknown")
        _log.warning(
            "load.failed", request_id=order.request_id, peer=order.target.worker_id, reason=load.error
        )

    async def _run(self, order: LoadOrdered, load: _Load) -> None:
        pool = await self._connect(order.target)
        stub = prefill_pb2_grpc.PrefillStub(self._channel(order.target.address))
        transfer_id = f"{self._host.worker_id}:{self._host.incarnation}:{order.request_id}"
        lease = LeaseView(monotonic)
        sent_at = monotonic()
        call = stub.Run(
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
                event = await self._next(call, order, renewing)
                if event.HasField("accepted"):
                    load.remote_cached_blocks = event.accepted.cached_blocks
                    lease.renewed(sent_at, event.accepted.lease_s)
                    renewing = asyncio.create_task(self._renew(stub, transfer_id, order.epoch, lease))
                else:
                    await self._pull(order, load, pool, event.ready, lease)
        except grpc.aio.AioRpcError as error:
            raise _as_source_failure(error, order.target) from error
        finally:
            lease.revoke("the load is over")
            call.cancel()  # the stream's end is the release
            if renewing:
                renewing.cancel()

    async def _next(
        self, call: grpc.aio.UnaryStreamCall, order: LoadOrdered, renewing: asyncio.Task[None] | None
    ) -> pb.RunEvent:
        """The next announcement. A peer that is silent too long or renews no more counts as lost."""
        reading = asyncio.ensure_future(call.read())
        awaited = {reading} if renewing is None else {reading, renewing}
        try:
            await asyncio.wait(
                awaited,
                timeout=self._host.settings.source_timeout_s,
                return_when=asyncio.FIRST_COMPLETED,
            )
            if not reading.done():
                raise PeerLost(f"{order.target.worker_id} announced nothing for too long")
            event = reading.result()
        finally:
            reading.cancel()
        if not isinstance(event, pb.RunEvent):  # grpc.aio.EOF
            raise PeerLost(f"{order.target.worker_id} ended the handoff early")
        return event

    async def _pull(
        self,
        order: LoadOrdered,
        load: _Load,
        pool: PeerPool,
        ready: pb.BlocksReady,
        lease: LeaseView,
    ) -> None:
        heard_at = monotonic()
        at = ready.first - order.first_block
        local_ids = order.block_ids[at : at + len(ready.block_ids)]
        if at != load.arrived or len(local_ids) != len(ready.block_ids):
            raise PeerLost(f"{order.target.worker_id} announced blocks out of order")
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
        """Keep the lease alive; returns when that has failed, with the lease void."""
        while True:
            await asyncio.sleep(max(0.01, lease.renew_due()))
            sent_at = monotonic()
            try:
                reply = await stub.Renew(
                    pb.RenewRequest(transfer_id=transfer_id, epoch=epoch),
                    timeout=min(CONTROL_TIMEOUT_S, lease.remaining()),
                )
            except grpc.aio.AioRpcError as error:
                lease.revoke(status.from_rpc(error, transfer_id).message)
                return
            lease.renewed(sent_at, reply.lease_s)

    # ---- peers

    async def _connect(self, target: PrefillTarget) -> PeerPool:
        """The peer's pool; the first time, fingerprints are compared and offers exchanged."""
        return await self._peers.get(target.worker_id, target.incarnation, lambda: self._handshake(target))

    async def _handshake(self, target: PrefillTarget) -> PeerPool:
        ours = self._host.built.fingerprint
        stub = prefill_pb2_grpc.PrefillStub(self._channel(target.address))
        request = pb.ConnectRequest(
            worker_id=self._host.worker_id,
            incarnation=self._host.incarnation,
            fingerprint=fingerprint_to_wire(ours),
        )
        try:
            reply = await stub.Connect(request, timeout=CONTROL_TIMEOUT_S)
        except grpc.aio.AioRpcError as error:
            raise _as_source_failure(error, target) from error
        check(ours, fingerprint_from_wire(reply.fingerprint))
        if reply.incarnation != target.incarnation:
            raise PeerLost(f"{target.worker_id} was restarted since the plan was made")
        offers = {offer.name: offer.body for offer in reply.offers}
        return await asyncio.to_thread(self._open, offers)

    def _open(self, offers: dict[str, bytes]) -> PeerPool:
        """Connect over the best transport that both sides run and that reaches the other."""
        names = choose(self._host.settings.transport, self._transports, offers)
        for name in names[:-1]:
            try:
                return self._transports[name].connect(offers[name])
            except PeerLost as error:
                _log.info("transport.passed_over", transport=name, reason=error.message)
        return self._transports[names[-1]].connect(offers[names[-1]])

    def _channel(self, address: str) -> grpc.aio.Channel:
        if address not in self._channels:
            self._channels[address] = channel.connect(address)
        return self._channels[address]


class _Load:
    """What one load has brought so far."""

    def __init__(self) -> None:
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


def _as_source_failure(error: grpc.aio.AioRpcError, target: PrefillTarget) -> SourceFailed:
    """A prefill worker's refusal is a miss here, whatever it is called there; busy is not lost."""
    failure = status.from_rpc(error, target.worker_id)
    if isinstance(failure, SourceFailed):
        return failure
    return SourceFailed(f"{target.worker_id} does not deliver: {failure.message}")
