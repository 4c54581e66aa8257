"""A prefill worker as a block source: ask, pull what it announces, verify.

The life of the Run call is the life of the lease on its blocks. Whatever goes wrong is SourceFailed.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

import grpc

from core.clock import monotonic
from core.errors import PeerLost, SourceFailed
from core.request import PrefillTarget
from kvtransfer.leases import LeaseView
from kvtransfer.peer_ranks import PeerRanks
from kvtransfer.puller import Puller
from kvtransfer.transport import ReadPending
from services.decode.peers import CONTROL_TIMEOUT_S, Peers, as_source_failure
from services.worker.host import WorkerHost
from wire import status
from wire.v1 import prefill_pb2 as pb
from wire.v1 import prefill_pb2_grpc


@dataclass(frozen=True, slots=True)
class Ask:
    """Blocks `first_block ...` of a prompt, into `block_ids` of the own pool.

    `token_ids` fill all blocks from 0 up to the last one asked for.
    """

    load_id: str
    request_id: str
    target: PrefillTarget
    token_ids: tuple[int, ...]
    cache_salt: str
    epoch: int
    first_block: int
    block_ids: tuple[int, ...]


@dataclass(slots=True)
class Brought:
    """What an Ask has brought so far. Instants are this process's monotonic seconds."""

    blocks: int = 0
    cached_blocks: int = 0
    queue_s: float = 0.0
    nbytes: int = 0
    transfer_s: float = 0.0
    exposed_s: float = 0.0
    last_block_at: float | None = None


class PrefillSource:
    """All prefill workers that plans name."""

    def __init__(self, host: WorkerHost, puller: Puller) -> None:
        self._host, self._puller = host, puller
        self._peers = Peers(host, puller)

    async def close(self) -> None:
        await self._peers.close()

    async def bring(self, ask: Ask, brought: Brought, moved: Callable[[], None]) -> None:
        """Fill the blocks in order, keeping `brought` up to date; `moved` after each batch of them.

        Raises SourceFailed; what came before stays good.
        """
        try:
            await self._run(ask, brought, moved)
        except SourceFailed as error:
            # A read that is only late keeps its connection: others may be reading over it.
            if isinstance(error, PeerLost) and not isinstance(error, ReadPending):
                self._peers.discard(ask.target)
            raise

    async def _run(self, ask: Ask, brought: Brought, moved: Callable[[], None]) -> None:
        peer = await self._peers.connect(ask.target)
        mine = f"{self._host.worker_id}:{self._host.incarnation}"
        transfer_id = f"{mine}:{ask.load_id}:{ask.first_block}"
        lease = LeaseView(monotonic)
        sent_at = monotonic()
        call = peer.stub.Run(
            pb.RunRequest(
                transfer_id=transfer_id,
                epoch=ask.epoch,
                incarnation=ask.target.incarnation,
                token_ids=ask.token_ids,
                cache_salt=ask.cache_salt,
                first_block=ask.first_block,
                request_id=ask.request_id,
            )
        )
        renewing: asyncio.Task[None] | None = None
        try:
            while brought.blocks < len(ask.block_ids):
                event = await self._next(call, ask.target, renewing, lease)
                match event.WhichOneof("kind"):
                    case "accepted":
                        lease.renewed(sent_at, event.accepted.lease_s)
                        renewing = asyncio.create_task(self._renew(peer.stub, transfer_id, ask.epoch, lease))
                    case "ready":
                        await self._pull(ask, brought, peer.ranks, event.ready, lease)
                        moved()
        except grpc.aio.AioRpcError as error:
            raise as_source_failure(error, ask.target) from error
        finally:
            lease.revoke("the load is over")
            call.cancel()  # the stream's end is the release
            if renewing:
                renewing.cancel()

    async def _next(
        self,
        call: grpc.aio.UnaryStreamCall,
        target: PrefillTarget,
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
                raise SourceFailed(f"{target.worker_id} announced nothing for too long")
            event = reading.result()
        finally:
            reading.cancel()
        if not isinstance(event, pb.RunEvent):  # the end of the stream
            raise PeerLost(f"{target.worker_id} ended the handoff early")
        return event

    async def _pull(
        self, ask: Ask, brought: Brought, peer: PeerRanks, ready: pb.BlocksReady, lease: LeaseView
    ) -> None:
        heard_at = monotonic()
        at = ready.first - ask.first_block
        local_ids = ask.block_ids[at : at + len(ready.block_ids)]
        if at != brought.blocks or len(local_ids) != len(ready.block_ids):
            raise SourceFailed(f"{ask.target.worker_id} announced blocks out of order")
        stats = await self._puller.pull(
            peer, list(ready.block_ids), local_ids, list(ready.checksums), lease, ask.load_id
        )
        brought.blocks += len(local_ids)
        brought.cached_blocks += len(local_ids) if ready.cached else 0
        brought.queue_s = ready.queue_s
        brought.nbytes += stats.nbytes
        brought.transfer_s += stats.seconds
        brought.last_block_at = heard_at - ready.age_s
        brought.exposed_s = monotonic() - brought.last_block_at

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
