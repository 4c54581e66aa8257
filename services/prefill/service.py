"""Prefill: a block source. Builds the blocks a decode worker lacks and holds them until pulled.

The Run stream is the lease: when it ends, for whatever reason, the job is aborted and its blocks
go back to the pool (they stay in the prefix cache). The deadline is only the backstop for a peer
that is alive to TCP but does nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

import grpc

from core import faults, log
from core.clock import monotonic
from core.errors import (
    BatonError,
    InvalidParameter,
    LeaseLost,
    PeerLost,
    SourceFailed,
)
from engine.messages import Abort, AddPrefill, BlocksBuilt, Event, Failed
from engine.sequence import PrefillJob
from kvtransfer.handshake import check
from kvtransfer.leases import LeaseTable
from services.worker.host import WorkerHost
from wire import status
from wire.codec import fingerprint_from_wire, fingerprint_to_wire
from wire.v1 import kv_pb2, prefill_pb2_grpc
from wire.v1 import prefill_pb2 as pb

_log = log.get("prefill")

EXPIRY_EVERY_S = 0.2


class PrefillService(prefill_pb2_grpc.PrefillServicer):
    """Connect, Run and Renew of one worker."""

    def __init__(self, host: WorkerHost) -> None:
        self._host = host
        self._leases = LeaseTable(monotonic, limit=host.settings.max_waiting)
        self._jobs: dict[str, _Job] = {}
        self._expiry = asyncio.create_task(self._expire())

    async def Connect(self, request: pb.ConnectRequest, context: grpc.aio.ServicerContext) -> pb.ConnectReply:
        built = self._host.built
        try:
            check(built.fingerprint, fingerprint_from_wire(request.fingerprint))
        except BatonError as error:
            await status.abort(context, error)
        offers = [kv_pb2.TransportOffer(name=name, bodies=each) for name, each in built.offers.items()]
        return pb.ConnectReply(
            incarnation=built.incarnation,
            fingerprint=fingerprint_to_wire(built.fingerprint),
            offers=offers,
        )

    async def Run(
        self, request: pb.RunRequest, context: grpc.aio.ServicerContext
    ) -> AsyncIterator[pb.RunEvent]:
        lease_s = self._host.settings.lease_s
        try:
            self._validate(request)
            self._leases.grant(request.transfer_id, request.epoch, lease_s)
        except BatonError as error:
            await status.abort(context, error)
        if stale := self._jobs.pop(request.transfer_id, None):
            stale.end(LeaseLost("a newer try of this request took over"))
        job = _Job(self._host, request)
        self._jobs[request.transfer_id] = job
        try:
            async for event in job.events(lease_s):
                yield event
        except BatonError as error:
            await status.abort(context, error)
        finally:
            job.close()
            if self._jobs.get(request.transfer_id) is job:
                del self._jobs[request.transfer_id]
            self._leases.release(request.transfer_id, request.epoch)

    async def Renew(self, request: pb.RenewRequest, context: grpc.aio.ServicerContext) -> pb.RenewReply:
        try:
            return pb.RenewReply(lease_s=self._leases.renew(request.transfer_id, request.epoch))
        except BatonError as error:
            await status.abort(context, error)

    async def close(self) -> None:
        self._expiry.cancel()
        for job in list(self._jobs.values()):
            job.end(PeerLost("this prefill worker is stopping"))
        with contextlib.suppress(asyncio.CancelledError):
            await self._expiry

    def _validate(self, request: pb.RunRequest) -> None:
        self._host.require_ready()
        built = self._host.built
        if request.incarnation != built.incarnation:
            raise PeerLost("this worker was restarted since the handshake; connect again")
        size, tokens = built.fingerprint.block_size, request.token_ids
        if not tokens or len(tokens) % size or request.first_block >= len(tokens) // size:
            raise InvalidParameter(f"token_ids must fill whole blocks of {size} beyond first_block")
        if len(tokens) > built.fingerprint.max_model_len:
            raise InvalidParameter(f"token_ids are more than the model's {built.fingerprint.max_model_len}")
        if max(tokens) >= built.config.vocab_size:
            raise InvalidParameter("token_ids holds an id outside the vocabulary")

    async def _expire(self) -> None:
        while True:
            await asyncio.sleep(EXPIRY_EVERY_S)
            for transfer_id in self._leases.expired():
                if job := self._jobs.get(transfer_id):
                    self._host.metrics.lease_expired()
                    _log.warning("lease.expired", transfer_id=transfer_id)
                    job.end(LeaseLost("the lease ran out without a sign of life"))


class _Job:
    """One Run call: engine events in, RunEvents out, until it is ended from either side."""

    def __init__(self, host: WorkerHost, request: pb.RunRequest) -> None:
        self._host, self._request = host, request
        self._id = f"{request.transfer_id}#{request.epoch}"
        # Two messages per chunk at most; the engine cannot run ahead further than the prompt.
        self._inbox: asyncio.Queue[Event | BatonError] = asyncio.Queue()

    def end(self, error: BatonError) -> None:
        """End the stream from this side; idempotent."""
        self._inbox.put_nowait(error)

    def close(self) -> None:
        self._host.hub.unregister(self._id)
        if self._host.lookups:
            self._host.lookups.forget(self._id)
        self._host.built.loop.submit(Abort(self._id))

    async def events(self, lease_s: float) -> AsyncIterator[pb.RunEvent]:
        if not self._host.hub.register(self._id, self._inbox.put_nowait):
            raise LeaseLost(f"transfer {self._id} is running already")
        arrived_s = monotonic()
        job = PrefillJob(self._id, tuple(self._request.token_ids), self._request.cache_salt)
        yield pb.RunEvent(accepted=pb.Accepted(lease_s=lease_s))
        await self._fault("prefill.start")
        add = AddPrefill(job, await self._num_held(job), arrived_s)
        self._host.take_up(self._request.request_id, add)
        while True:
            match event := await self._inbox.get():
                case BlocksBuilt():
                    if ready := await self._publish(event):
                        yield pb.RunEvent(ready=ready)
                case Failed():
                    raise event.error
                case BatonError():
                    raise event

    async def _num_held(self, job: PrefillJob) -> int:
        if self._host.lookups is None:
            return 0
        count = len(job.token_ids) // self._host.built.fingerprint.block_size
        return await self._host.lookups.look_up(self._id, job.token_ids, count, job.cache_salt)

    async def _publish(self, built: BlocksBuilt) -> pb.BlocksReady | None:
        """Announce what the caller lacks of these blocks, with the checksum of each."""
        skip = max(0, self._request.first_block - built.first)
        block_ids = built.block_ids[skip:]
        if not block_ids:
            return None
        await self._fault("prefill.publish")
        sums = await asyncio.to_thread(self._host.built.ranks.checksums, block_ids)
        return pb.BlocksReady(
            first=built.first + skip,
            block_ids=block_ids,
            checksums=sums,
            age_s=monotonic() - built.at_s,
            cached=built.cached,
            queue_s=built.queue_s,
        )

    @staticmethod
    async def _fault(point: str) -> None:
        try:
            await faults.reached(point)
        except faults.InjectedFault as error:
            raise SourceFailed(str(error)) from error


def attach(host: WorkerHost, server: grpc.aio.Server) -> PrefillService:
    service = PrefillService(host)
    prefill_pb2_grpc.add_PrefillServicer_to_server(service, server)
    return service
