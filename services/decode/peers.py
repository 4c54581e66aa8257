"""The prefill workers that this decode worker has shaken hands with."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

import grpc

from core import log
from core.errors import ConfigError, PeerLost, SourceFailed
from core.request import PrefillTarget
from kvtransfer.handshake import PeerBook, check
from kvtransfer.offers import hosts_named
from kvtransfer.peer_ranks import PeerRanks
from kvtransfer.puller import Puller
from kvtransfer.transport import choose
from services import address
from services.host_list import HostList, require_same_host
from services.worker.host import WorkerHost
from wire import channel, status
from wire.codec import fingerprint_from_wire, fingerprint_to_wire
from wire.v1 import prefill_pb2 as pb
from wire.v1 import prefill_pb2_grpc

_log = log.get("decode")

CONTROL_TIMEOUT_S = 5.0
"""Bound of Connect and Renew: small calls that compute nothing."""

MAX_PEERS = 256
RETIRED_GRACE_S = 60.0
"""How long calls of other loads may still run on a connection that was given up."""

Offers = dict[str, list[bytes]]
"""Of a peer, by transport: one per rank."""


@dataclass(frozen=True, slots=True, eq=False)
class Peer:
    """One life of one prefill worker: its RPCs and its blocks."""

    channel: grpc.aio.Channel
    stub: prefill_pb2_grpc.PrefillStub
    ranks: PeerRanks


class Peers:
    """Connects on demand, once for all loads of a peer; forgets peers that were lost or replaced."""

    def __init__(self, host: WorkerHost, puller: Puller) -> None:
        self._host, self._puller = host, puller
        self._allowed = HostList.parse(host.settings.transfer_hosts)
        self._book: PeerBook[Peer] = PeerBook(self._retire, limit=MAX_PEERS)
        self._closing: set[asyncio.Task[None]] = set()

    async def connect(self, target: PrefillTarget) -> Peer:
        """The peer; the first time, fingerprints are compared and offers exchanged. Raises SourceFailed."""
        return await self._book.get(target.worker_id, target.incarnation, lambda: self._handshake(target))

    def discard(self, target: PrefillTarget) -> None:
        """The peer was lost: connect anew next time."""
        self._book.discard(target.worker_id, target.incarnation)

    async def close(self) -> None:
        self._book.close()
        for task in self._closing:
            task.cancel()
        await asyncio.gather(*self._closing, return_exceptions=True)

    async def _handshake(self, target: PrefillTarget) -> Peer:
        host = await asyncio.to_thread(self._allowed_host, target.address)
        open_channel = channel.connect(target.address, self._host.identity)
        try:
            stub = prefill_pb2_grpc.PrefillStub(open_channel)
            offers = await self._exchange(stub, target)
            ranks = await asyncio.to_thread(self._open, offers, host)
        except BaseException:
            await open_channel.close()
            raise
        return Peer(open_channel, stub, ranks)

    async def _exchange(self, stub: prefill_pb2_grpc.PrefillStub, target: PrefillTarget) -> Offers:
        ours = self._host.built.fingerprint
        request = pb.ConnectRequest(fingerprint=fingerprint_to_wire(ours))
        try:
            reply = await stub.Connect(request, timeout=CONTROL_TIMEOUT_S)
        except grpc.aio.AioRpcError as error:
            raise as_source_failure(error, target) from error
        check(ours, fingerprint_from_wire(reply.fingerprint))
        if reply.incarnation != target.incarnation:
            raise PeerLost(f"{target.worker_id} was restarted since the plan was made")
        return {offer.name: list(offer.bodies) for offer in reply.offers}

    def _allowed_host(self, target: str) -> str:
        """The host of an address that a router named. Raises PeerLost if we may not connect to it."""
        try:
            host, _ = address.split(target, "a prefill worker's address")
        except ConfigError as error:
            raise PeerLost(error.message) from None
        self._allowed.check(host)
        return host

    def _open(self, offers: Offers, host: str) -> PeerRanks:
        """Connect over the best transport that both sides run and that reaches the other. `host`: where the
        peer answered; it may send us to another one only if that is among `transfer_hosts`."""
        names = choose(self._host.settings.transport, self._host.built.ranks.transports, offers)
        for name in names[:-1]:
            try:
                return self._reach(name, offers[name], host)
            except PeerLost as error:
                _log.info("transport.passed_over", transport=name, reason=error.message)
        return self._reach(names[-1], offers[names[-1]], host)

    def _reach(self, name: str, bodies: list[bytes], host: str) -> PeerRanks:
        for named in hosts_named(name, bodies) - {host}:
            if self._allowed.lists_all:
                require_same_host(named, host)
            else:
                self._allowed.check(named)
        return self._host.built.ranks.connect(name, bodies)

    def _retire(self, peer: Peer) -> None:
        self._puller.retire(peer.ranks)
        task = asyncio.create_task(peer.channel.close(RETIRED_GRACE_S))
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)


def as_source_failure(error: grpc.aio.AioRpcError, target: PrefillTarget) -> SourceFailed:
    """A prefill worker's refusal is a miss here, whatever it is called there; busy is not lost."""
    failure = status.from_rpc(error, target.worker_id)
    if isinstance(failure, SourceFailed):
        return failure
    return SourceFailed(f"{target.worker_id} does not deliver: {failure.message}")
