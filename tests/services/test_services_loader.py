"""The prefill worker as a source, against a scripted one behind real gRPC: each load ends exactly once."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from types import SimpleNamespace

import pytest

from core.errors import LeaseLost
from core.kv import Fingerprint
from core.request import PrefillTarget, Request, SamplingParams
from core.settings import Settings
from engine.messages import BlocksArrived, Command, LoadCancelled, LoadFinished, LoadOrdered, LoadReport
from kvtransfer.checksum import checksum
from kvtransfer.region import Region
from kvtransfer.transport import FakeTransport
from services.decode.sources import Loader
from wire import channel, status
from wire.codec import fingerprint_to_wire
from wire.v1 import kv_pb2, prefill_pb2_grpc
from wire.v1 import prefill_pb2 as pb

FINGERPRINT = Fingerprint("m", "t", 1, 1, 8, 8, "fp32", "default/1", 64)
NBYTES = 4096
Script = Callable[[pb.RunRequest], AsyncIterator[pb.RunEvent]]


class Source(prefill_pb2_grpc.PrefillServicer):
    """A prefill worker whose Run follows a script."""

    def __init__(self) -> None:
        self.region = Region.create(8, NBYTES, "their-life")
        for i in range(8):
            self.region.block(i)[:] = bytes([i + 1]) * NBYTES
        self.transport = FakeTransport(self.region)
        self.script: Script = self.deliver
        self.connects = self.renews = self.ended = 0
        self.renew_error: LeaseLost | None = None

    async def Connect(self, request, context):
        self.connects += 1
        offer = kv_pb2.TransportOffer(name="fake", body=self.transport.offer())
        return pb.ConnectReply(
            incarnation="their-life", fingerprint=fingerprint_to_wire(FINGERPRINT), offers=[offer]
        )

    async def Run(self, request, context):
        try:
            async for event in self.script(request):
                yield event
        finally:
            self.ended += 1

    async def Renew(self, request, context):
        self.renews += 1
        if self.renew_error:
            await status.abort(context, self.renew_error)
        return pb.RenewReply(lease_s=0.6)

    def ready(self, first: int, ids: list[int]) -> pb.RunEvent:
        sums = [checksum(self.region.block(i)) for i in ids]
        return pb.RunEvent(ready=pb.BlocksReady(first=first, block_ids=ids, checksums=sums))

    async def deliver(self, request: pb.RunRequest) -> AsyncIterator[pb.RunEvent]:
        yield pb.RunEvent(accepted=pb.Accepted(lease_s=0.6))
        yield pb.RunEvent(started=pb.Started(cached_blocks=1))
        yield self.ready(0, [5, 3])
        yield self.ready(2, [4])
        await asyncio.sleep(5)

    async def never(self, request: pb.RunRequest) -> AsyncIterator[pb.RunEvent]:
        yield pb.RunEvent(accepted=pb.Accepted(lease_s=0.6))
        await asyncio.sleep(30)


class Bench:
    """A Loader on a host that only collects commands."""

    def __init__(self, source: Source, address: str, **settings: object) -> None:
        self.source = source
        self.region = Region.create(8, NBYTES, "our-life")
        self.commands: list[Command] = []
        self.failures: list[str] = []
        built = SimpleNamespace(
            transports=[FakeTransport(self.region)],
            fingerprint=FINGERPRINT,
            loop=SimpleNamespace(submit=lambda *commands: self.commands.extend(commands)),
        )
        metrics = SimpleNamespace(transfer_failed=self.failures.append, transferred=lambda *_: None)
        host = SimpleNamespace(
            built=built,
            metrics=metrics,
            settings=Settings.model_validate({"source_timeout_s": 5.0} | settings),
            worker_id="d0",
            incarnation="our-life",
        )
        self.loader = Loader(host)  # type: ignore[arg-type]
        self.address = address

    def order(self, name: str, blocks: tuple[int, ...] = (0, 1, 2)) -> None:
        target = PrefillTarget("p0", self.address, "their-life")
        params = SamplingParams(max_tokens=1, seed=0)
        self.loader.expect(Request(name, tuple(range(25)), params, prefill=target))
        self.loader.on_event(LoadOrdered(name, 0, blocks, tuple(bytes([i]) * 32 for i in blocks)))

    async def report(self, name: str, within_s: float = 5.0) -> LoadReport:
        """The load's one and only report."""
        async with asyncio.timeout(within_s):
            while not (
                found := [
                    c.report for c in self.commands if isinstance(c, LoadFinished) and c.request_id == name
                ]
            ):
                await asyncio.sleep(0.01)
        await asyncio.sleep(0.05)
        assert len(found) == 1
        return found[0]


@pytest.fixture
async def bench(monkeypatch):
    monkeypatch.setattr("services.decode.peers.choose", lambda setting, ours, theirs: ["fake"])
    source, server = Source(), channel.server()
    prefill_pb2_grpc.add_PrefillServicer_to_server(source, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    made: list[Bench] = []

    def make(**settings: object) -> Bench:
        made.append(Bench(source, f"127.0.0.1:{port}", **settings))
        return made[-1]

    yield make
    for each in made:
        await each.loader.close()
    await server.stop(0)


async def test_blocks_arrive_as_they_are_announced(bench) -> None:
    b = bench()
    b.order("r")
    report = await b.report("r")
    assert (report.arrived, report.nbytes, report.error, report.unquiet) == (3, 3 * NBYTES, "", ())
    assert report.remote_cached_blocks == 1
    assert [c.count for c in b.commands if isinstance(c, BlocksArrived)] == [2, 3]
    assert [b.region.block(i)[0] for i in range(3)] == [6, 4, 5]
    async with asyncio.timeout(2):
        while not b.source.ended:
            await asyncio.sleep(0.01)


async def test_a_load_cancelled_before_its_first_turn_still_reports(bench) -> None:
    """1. ordered  2. cancelled in the same turn of the loop: the task's body never runs."""
    b = bench()
    b.order("r")
    b.loader.on_event(LoadCancelled("r"))
    assert (await b.report("r")).arrived == 0
    assert b.source.connects == 0


async def test_a_load_cancelled_while_it_waits_releases_the_source(bench) -> None:
    b = bench()
    b.source.script = b.source.never
    b.order("r")
    await asyncio.sleep(0.3)
    b.loader.on_event(LoadCancelled("r"))
    assert (await b.report("r")).arrived == 0
    async with asyncio.timeout(2):
        while not b.source.ended:
            await asyncio.sleep(0.01)


async def test_the_lease_is_renewed_while_the_job_waits_in_the_queue(bench) -> None:
    b = bench()

    async def queued(request: pb.RunRequest) -> AsyncIterator[pb.RunEvent]:
        yield pb.RunEvent(accepted=pb.Accepted(lease_s=0.6))
        await asyncio.sleep(1.5)
        yield pb.RunEvent(started=pb.Started())
        yield b.source.ready(0, [1, 2, 3])
        await asyncio.sleep(5)

    b.source.script = queued
    b.order("r")
    assert (await b.report("r")).arrived == 3
    assert b.source.renews >= 3


async def test_a_lease_that_cannot_be_renewed_ends_the_load(bench) -> None:
    b = bench()
    b.source.script, b.source.renew_error = b.source.never, LeaseLost("not held here")
    b.order("r")
    report = await b.report("r", within_s=2.0)
    assert report.error.startswith("lease_lost")
    assert b.failures == ["lease_lost"]


async def test_one_slow_load_leaves_its_neighbours_alone(bench) -> None:
    """1. A waits in vain  2. A gives up  3. B, over the same connection, is not disturbed."""
    b = bench(source_timeout_s=0.4)
    b.source.script = b.source.never
    b.order("a")
    await asyncio.sleep(0.2)

    async def late(request: pb.RunRequest) -> AsyncIterator[pb.RunEvent]:
        yield pb.RunEvent(accepted=pb.Accepted(lease_s=0.6))
        for first in range(3):
            await asyncio.sleep(0.3)
            yield b.source.ready(first, [first])
        await asyncio.sleep(5)

    b.source.script = late
    b.order("b", (3, 4, 5))
    assert (await b.report("a")).error.startswith("source_failed")
    assert (await b.report("b")).arrived == 3
    assert b.source.connects == 1


async def test_what_is_announced_out_of_order_or_damaged_is_a_miss(bench) -> None:
    b = bench()

    async def wrong(request: pb.RunRequest) -> AsyncIterator[pb.RunEvent]:
        yield pb.RunEvent(accepted=pb.Accepted(lease_s=0.6))
        event = b.source.ready(0, [1])
        if request.transfer_id.endswith("order"):
            event.ready.first = 1
        else:
            event.ready.checksums[0] ^= 1
        yield event
        await asyncio.sleep(5)

    b.source.script = wrong
    b.order("order")
    b.order("damaged", (3, 4, 5))
    assert (await b.report("order")).error.startswith("source_failed")
    assert (await b.report("damaged")).error.startswith("checksum_mismatch")
    assert sorted(b.failures) == ["checksum_mismatch", "source_failed"]


async def test_nobody_there_is_a_miss(bench) -> None:
    b = bench()
    b.address = "127.0.0.1:1"
    b.order("r")
    assert (await b.report("r")).error.startswith("peer_lost")
