"""The prefill worker as a source, against a scripted one behind real gRPC: each load ends exactly once."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from types import SimpleNamespace

import pytest

from core.errors import LeaseLost
from core.kv import Fingerprint, KVLayout
from core.request import PrefillTarget, Request, SamplingParams
from core.settings import Settings
from engine.kernels.torch_kernels import TorchKernels
from engine.messages import (
    BlocksArrived,
    Command,
    EngineStats,
    LoadCancelled,
    LoadFinished,
    LoadOrdered,
    LoadReport,
)
from engine.step import Limits
from kvtransfer.checksum import checksum
from kvtransfer.offers import CollectiveOffer, encode
from kvtransfer.ranks import Ranks
from kvtransfer.region import Region
from kvtransfer.tier import FakeTier
from kvtransfer.tier_pool import RegionPool
from kvtransfer.tier_stack import Held, TierStack
from kvtransfer.transport import FakeTransport
from services.decode.sources import Loader
from services.worker.links import Links
from services.worker.tiers import Lookups
from wire import channel, status
from wire.codec import fingerprint_to_wire
from wire.v1 import kv_pb2, prefill_pb2_grpc
from wire.v1 import prefill_pb2 as pb

FINGERPRINT = Fingerprint("m", "t", 1, 1, 64, 8, "fp32", "default/1", 64)
LAYOUT = KVLayout(1, 1, 64, 8, "fp32")
NBYTES = LAYOUT.block_nbytes
Script = Callable[[pb.RunRequest], AsyncIterator[pb.RunEvent]]


class Source(prefill_pb2_grpc.PrefillServicer):
    """A prefill worker whose Run follows a script."""

    def __init__(self) -> None:
        self.region = Region.create(8, NBYTES, "their-life")
        for i in range(8):
            self.region.block(i)[:] = bytes([i + 1]) * NBYTES
        self.transport = FakeTransport(self.region)
        self.transport_name = "fake"
        self.script: Script = self.deliver
        self.connects = self.renews = self.ended = 0
        self.renew_error: LeaseLost | None = None

    async def Connect(self, request, context):
        self.connects += 1
        offer = kv_pb2.TransportOffer(name=self.transport_name, bodies=[self.transport.offer()])
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

    def ready(self, first: int, ids: list[int], cached: bool = False) -> pb.RunEvent:
        sums = [checksum(self.region.block(i)) for i in ids]
        return pb.RunEvent(ready=pb.BlocksReady(first=first, block_ids=ids, checksums=sums, cached=cached))

    async def deliver(self, request: pb.RunRequest) -> AsyncIterator[pb.RunEvent]:
        yield pb.RunEvent(accepted=pb.Accepted(lease_s=0.6))
        yield self.ready(0, [5, 3])
        yield self.ready(2, [4], cached=True)
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
        self.sources: list[str] = []
        built = SimpleNamespace(
            ranks=Ranks(LAYOUT, [self.region], {"fake": FakeTransport}, TorchKernels()),
            fingerprint=FINGERPRINT,
            limits=Limits(8, 64, 4, 32, 8),
            region=self.region,
            loop=SimpleNamespace(
                submit=lambda *commands: self.commands.extend(commands),
                stats=EngineStats(),
            ),
        )
        metrics = SimpleNamespace(transfer_failed=self.failures.append, transferred=lambda *_: None)
        metrics.loaded = self.sources.append
        self.stack: TierStack | None = None
        self.host = SimpleNamespace(
            built=built,
            metrics=metrics,
            settings=Settings.model_validate({"source_timeout_s": 5.0} | settings),
            worker_id="d0",
            incarnation="our-life",
            identity=channel.OPEN,
            lookups=None,
            links=Links(),
        )
        self.loader = Loader(self.host)  # type: ignore[arg-type]
        self.address = address

    def order(
        self,
        name: str,
        blocks: tuple[int, ...] = (0, 1, 2),
        remote: bool = True,
        min_tokens: int = 1,
        cached: int = 0,
        queue_s: float = 0.0,
    ) -> None:
        target = None
        if remote:
            target = PrefillTarget("p0", self.address, "their-life", min_tokens, cached, queue_s=queue_s)
        params = SamplingParams(max_tokens=1, seed=0)
        self.loader.expect(Request(name, tuple(range(25)), params, prefill=target))
        self.loader.on_event(
            LoadOrdered(name, name, 0, blocks, tuple(bytes([i]) * 32 for i in blocks), remote)
        )

    def with_tier(self, held: int) -> FakeTier:
        """Give the worker a tier that holds the first blocks of every order of (0, 1, 2)."""
        tier = FakeTier("disk", {bytes([i]) * 32: bytes([90 + i]) * NBYTES for i in range(held)})
        self.stack = TierStack(RegionPool(self.region), 0, [tier])
        self.host.lookups = Lookups(self.stack, FINGERPRINT, lambda: 1.0)
        return tier

    async def report(self, name: str, within_s: float = 5.0) -> LoadReport:
        """The load's one and only report."""
        async with asyncio.timeout(within_s):
            while not (
                found := [
                    c.report for c in self.commands if isinstance(c, LoadFinished) and c.load_id == name
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
        if each.stack:
            await each.stack.close()
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


async def test_a_pull_tells_how_fast_the_link_to_this_peer_is(bench) -> None:
    b = bench()
    b.order("r")
    await b.report("r")
    assert list(b.host.links.rates()) == ["their-life"]


@pytest.mark.parametrize(("min_tokens", "source"), [(24, "prefill"), (25, "local")])
async def test_a_prefill_worker_is_asked_if_the_plan_finds_it_worth_it(bench, min_tokens, source) -> None:
    """24 tokens are missing. However long its queue is: the plan has counted that."""
    b = bench()
    b.order("r", min_tokens=min_tokens, cached=3, queue_s=10.0)
    report = await b.report("r")
    assert b.sources == [source]
    assert (report.arrived > 0) is (source == "prefill")


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
        if ":order:" in request.transfer_id:
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


async def test_a_tier_brings_what_it_holds_and_nobody_is_asked(bench) -> None:
    b = bench()
    b.with_tier(3)
    b.order("r")
    report = await b.report("r")
    assert (report.arrived, report.by_tier, report.nbytes) == (3, (("disk", 3),), 0)
    assert [b.region.block(i)[0] for i in range(3)] == [90, 91, 92]
    assert [(c.count, c.from_store) for c in b.commands if isinstance(c, BlocksArrived)][-1] == (3, 3)
    assert b.source.connects == 0
    assert b.sources == ["disk+local"]
    assert report.plan.startswith("disk+local ")


async def test_a_tier_and_the_prefill_worker_bring_their_parts_at_the_same_time(bench) -> None:
    b = bench()
    b.with_tier(1)
    b.host.links.pulled("their-life", 100_000, 1.0)  # so slow that a tier is worth loading from

    async def rest(request: pb.RunRequest) -> AsyncIterator[pb.RunEvent]:
        yield pb.RunEvent(accepted=pb.Accepted(lease_s=0.6))
        yield b.source.ready(request.first_block, [5, 3])
        await asyncio.sleep(5)

    b.source.script = rest
    b.order("r", cached=3)
    report = await b.report("r")
    assert (report.arrived, report.by_tier, report.nbytes) == (3, (("disk", 1),), 2 * NBYTES)
    assert [b.region.block(i)[0] for i in range(3)] == [90, 6, 4]


async def test_what_a_tier_lost_since_the_look_up_is_asked_of_the_prefill_worker(bench) -> None:
    """1. The tier holds two of three blocks. 2. It loses the second. 3. P brings the third, then the second."""
    b = bench()
    tier = b.with_tier(2)
    b.host.links.pulled("their-life", 100_000, 1.0)
    asked: list[tuple[int, int]] = []

    async def script(request: pb.RunRequest) -> AsyncIterator[pb.RunEvent]:
        asked.append((request.first_block, len(request.token_ids) // 8))
        yield pb.RunEvent(accepted=pb.Accepted(lease_s=0.6))
        yield b.source.ready(request.first_block, [request.first_block])
        await asyncio.sleep(5)

    b.source.script = script
    await b.host.lookups.look_up("r", tuple(range(24)), 0, "")
    b.host.lookups._found["r"] = [Held("disk", 0, 2)]
    del tier.held[bytes([1]) * 32]
    b.order("r", cached=3)
    report = await b.report("r")
    assert asked == [(2, 3), (1, 2)]
    assert (report.arrived, report.by_tier) == (3, (("disk", 1),))
    assert [b.region.block(i)[0] for i in range(3)] == [90, 2, 3]


async def test_a_short_rest_is_not_worth_a_question(bench) -> None:
    b = bench()
    b.with_tier(2)
    b.order("r", min_tokens=16)
    report = await b.report("r")
    assert (report.arrived, b.source.connects) == (2, 0)


async def test_without_a_plan_what_no_tier_brings_is_computed(bench) -> None:
    b = bench()
    tier = b.with_tier(2)
    tier.broken = True
    b.order("r", remote=False)
    report = await b.report("r")
    assert (report.arrived, report.error) == (0, "")


async def test_a_load_from_a_tier_that_is_cancelled_leaves_its_blocks_quiet(bench) -> None:
    b = bench()
    tier = b.with_tier(3)
    tier.stick()
    b.order("r", remote=False)
    await asyncio.sleep(0.1)
    b.loader.on_event(LoadCancelled("r"))
    report = await b.report("r")
    assert (report.arrived, report.unquiet) == (0, ())
    tier.release()


@pytest.mark.parametrize(
    ("listed", "address", "why"),
    [
        ("10.0.0.0/8", "", "127.0.0.1 is not among --transfer-hosts"),
        ("10.0.0.0/8", "no-such-host.invalid:80", "cannot be found"),
        ("", "unix:/tmp/anybodys.sock", "is not host:port"),
        ("", "dns://198.51.100.1/prefill:80", "is not host:port"),
        ("", "", ""),
        ("127.0.0.0/8", "", ""),
    ],
)
async def test_only_hosts_that_are_listed_are_connected_to(
    bench, listed: str, address: str, why: str
) -> None:
    """Whatever address a plan names; what is refused is a miss, and nobody has been called."""
    b = bench(transfer_hosts=listed)
    b.address = address or b.address
    b.order("r")
    report = await b.report("r")
    assert b.source.connects == (0 if why else 1)
    assert report.arrived == (0 if why else 3)
    assert report.error.startswith("peer_lost") == bool(why)
    assert why in report.error


async def test_a_peer_that_sends_us_to_another_host_is_not_followed(bench, monkeypatch) -> None:
    """1. The peer's collective offer names another host.  2. We do not go there, unless it is listed."""
    monkeypatch.setattr("services.decode.peers.choose", lambda setting, ours, theirs: ["collective"])
    asked: list[str] = []
    monkeypatch.setattr(Ranks, "connect", lambda self, name, offers: asked.append(name))
    for listed, why in (
        ("", "another host"),
        ("127.0.0.1", "192.0.2.1 is not among"),
        ("127.0.0.1,192.0.2.0/24", ""),
    ):
        b = bench(transfer_hosts=listed)
        offer = CollectiveOffer("192.0.2.1", 80, "t", "their-life", 8, NBYTES)
        monkeypatch.setattr(b.source.transport, "offer", lambda offer=offer: encode(offer))
        monkeypatch.setattr(b.source, "transport_name", "collective")
        b.order("r")
        assert why in (await b.report("r")).error
        assert asked == ([] if why else ["collective"])


async def test_a_prefill_worker_with_another_token_is_a_miss(monkeypatch) -> None:
    monkeypatch.setattr("services.decode.peers.choose", lambda setting, ours, theirs: ["fake"])
    source, server = Source(), channel.server(channel.Identity("the-token-of-the-prefill-worker"))
    prefill_pb2_grpc.add_PrefillServicer_to_server(source, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    for shown, arrived in (
        ("", 0),
        ("some-other-token-as-it-happens", 0),
        ("the-token-of-the-prefill-worker", 3),
    ):
        b = Bench(source, f"127.0.0.1:{port}")
        b.host.identity = channel.Identity(shown)
        b.order("r")
        report = await b.report("r")
        assert report.arrived == arrived
        assert ("BATON_CLUSTER_TOKEN" in report.error) == (arrived == 0)
        assert not shown or shown not in report.error
        await b.loader.close()
    assert source.connects == 1
    await server.stop(0)
