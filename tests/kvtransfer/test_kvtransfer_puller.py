"""The verified pull (pains C1-C3): what is accepted is what was announced, under a lease that held."""

import asyncio
import json
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from core.clock import monotonic
from core.errors import ChecksumMismatch, LeaseLost, PeerLost, SourceFailed
from kvtransfer.checksum import checksum
from kvtransfer.leases import LeaseView
from kvtransfer.ledger import Ledger
from kvtransfer.nixl_transport import NixlTransport
from kvtransfer.peer_ranks import DirectRanks
from kvtransfer.puller import Puller
from kvtransfer.region import Region
from kvtransfer.shm_transport import ShmTransport
from kvtransfer.transport import FakeTransport, ReadPending

BLOCKS = [0, 1, 2, 3]


def lease(lease_s: float = 60.0) -> LeaseView:
    view = LeaseView(monotonic)
    view.renewed(monotonic(), lease_s)
    return view


class Bench:
    """A puller, its ledger and a fake peer whose block i is full of byte i + 1."""

    def __init__(self, limit: int = 8) -> None:
        self.ours = Region.create(8, 256, "ours")
        self.theirs = Region.create(8, 256, "theirs")
        for i in range(8):
            self.theirs.block(i)[:] = bytes([i + 1]) * 256
        self.sums = [checksum(self.theirs.block(i)) for i in range(8)]
        self.quiet: list[int] = []
        self.ledger = Ledger(self.quiet.extend)
        self.puller = Puller(self.ledger, timeout_s=0.2, limit=limit)
        self.pool = FakeTransport(self.ours).connect(FakeTransport(self.theirs).offer())
        self.peer = DirectRanks([self.pool])

    async def pull(self, view: LeaseView | None = None, owner: str = "r", remote=(4, 5, 6, 7)):
        sums = [self.sums[i] for i in remote]
        return await self.puller.pull(self.peer, remote, BLOCKS[: len(remote)], sums, view or lease(), owner)


@pytest.fixture
def bench():
    bench = Bench()
    yield bench
    bench.puller.close()


async def until(condition, timeout_s: float = 5.0) -> None:
    deadline = monotonic() + timeout_s
    while not condition():
        assert monotonic() < deadline, "waited for too long"
        await asyncio.sleep(0.005)


async def test_a_pull_brings_verified_bytes(bench):
    stats = await bench.pull()
    assert stats.nbytes == 4 * 256
    assert [checksum(bench.ours.block(i)) for i in BLOCKS] == bench.sums[4:]
    assert (bench.ledger.in_flight, bench.quiet) == (0, [])
    assert bench.ledger.release("r", BLOCKS) == BLOCKS


async def test_a_block_reused_under_the_read_is_a_checksum_mismatch(bench):
    bench.theirs.block(6)[100] = 0
    with pytest.raises(ChecksumMismatch, match="peer's block 6"):
        await bench.pull()
    assert bench.ledger.in_flight == 0


async def test_a_lease_that_ends_during_the_read_voids_it(bench, set_faults):
    """1. The lease is valid. 2. The read takes longer than the lease. 3. Right bytes, still refused."""
    set_faults("transfer.read=delay:0.3")
    with pytest.raises(LeaseLost, match="ran out"):
        await bench.pull(lease(0.2))
    assert [checksum(bench.ours.block(i)) for i in BLOCKS] == bench.sums[4:]


async def test_a_lease_renewed_during_the_read_holds(bench, set_faults):
    set_faults("transfer.read=delay:0.3")
    view = lease(0.2)
    pulling = asyncio.ensure_future(bench.pull(view))
    await asyncio.sleep(0.1)
    view.renewed(monotonic(), 60.0)
    assert (await pulling).nbytes == 1024


async def test_a_lease_revoked_between_read_and_verification_voids_it(bench, set_faults):
    set_faults("transfer.verify=delay:0.2")
    view = lease()
    pulling = asyncio.ensure_future(bench.pull(view))
    await asyncio.sleep(0.1)
    view.revoke("the stream broke")
    with pytest.raises(LeaseLost, match="the stream broke"):
        await pulling


async def test_nothing_is_read_for_a_lease_lost_in_the_queue(bench):
    view = lease()
    view.revoke("aborted")
    with pytest.raises(LeaseLost):
        await bench.pull(view)
    assert not any(bench.ours.data)


@pytest.mark.parametrize("point", ["transfer.read", "transfer.verify"])
async def test_an_injected_fault_is_a_lost_peer_and_the_thread_lives_on(bench, set_faults, point):
    set_faults(f"{point}@1=raise")
    with pytest.raises(PeerLost, match=point):
        await bench.pull()
    await bench.pull()


async def test_a_lost_peer(bench):
    bench.pool.lost = True
    with pytest.raises(PeerLost):
        await bench.pull()
    assert bench.ledger.in_flight == 0


async def test_a_bug_reaches_the_caller_and_the_thread_lives_on(bench):
    peer, bench.peer = bench.peer, DirectRanks([None])
    with pytest.raises(AttributeError):
        await bench.pull()
    assert bench.ledger.in_flight == 0
    bench.peer = peer
    await bench.pull()


async def test_blocks_of_a_timed_out_read_stay_quarantined_until_it_ended(bench):
    """1. The peer hangs. 2. The pull fails in time. 3. Its blocks stay out of use. 4. The late write
    lands in them. 5. Only then are they free."""
    bench.pool.stuck = True
    with pytest.raises(ReadPending):
        await bench.pull()
    assert bench.ledger.release("r", BLOCKS) == []
    assert bench.ledger.quarantined == 4
    with pytest.raises(ValueError, match="still in flight"):
        bench.ledger.begin("next", [0])
    await asyncio.sleep(0.05)
    assert (bench.quiet, any(bench.ours.data)) == ([], False)
    bench.pool.stuck = False
    await until(lambda: bench.quiet)
    assert bench.quiet == BLOCKS
    assert bench.ours.block(0)[0] == 5
    assert bench.ledger.quarantined == bench.ledger.in_flight == 0


async def test_cancelling_the_waiter_does_not_free_the_blocks(bench, set_faults):
    """Pain C3: an abort during a slow read; the next request must not get the blocks before it ended."""
    set_faults("transfer.read=delay:0.2")
    pulling = asyncio.ensure_future(bench.pull())
    await asyncio.sleep(0.05)
    pulling.cancel()
    with pytest.raises(asyncio.CancelledError):
        await pulling
    assert bench.ledger.release("r", BLOCKS) == []
    assert not any(bench.ours.data)
    await until(lambda: bench.quiet)
    assert bench.quiet == BLOCKS
    assert any(bench.ours.data)


async def test_a_pull_cancelled_in_the_queue_is_not_read(bench, set_faults):
    set_faults("transfer.read@1=delay:0.2")
    first = asyncio.ensure_future(bench.pull(owner="a", remote=(7,)))
    await asyncio.sleep(0.05)
    second = asyncio.ensure_future(bench.puller.pull(bench.peer, [4], [5], bench.sums[4:5], lease(), "b"))
    await asyncio.sleep(0)
    second.cancel()
    await first
    await until(lambda: bench.ledger.in_flight == 0)
    assert not any(bench.ours.block(5))


async def test_the_queue_is_bounded(set_faults):
    bench = Bench(limit=2)
    set_faults("transfer.read@1=delay:0.2")
    pulls = [asyncio.ensure_future(bench.pull(owner="r")) for _ in range(2)]
    await asyncio.sleep(0)
    with pytest.raises(SourceFailed, match="2 pulls are waiting"):
        await bench.pull()
    await asyncio.gather(*pulls)
    await bench.pull()
    bench.puller.close()


async def test_an_announcement_without_a_checksum_for_each_block_is_refused(bench):
    with pytest.raises(PeerLost, match="2 blocks of 1 ranks with 1 checksums"):
        await bench.puller.pull(bench.peer, [0, 1], [0, 1], [1], lease(), "r")
    assert bench.ledger.in_flight == 0


async def test_a_retired_pool_closes_behind_the_reads_in_the_queue(bench, set_faults):
    set_faults("transfer.read@1=delay:0.1")
    pulling = asyncio.ensure_future(bench.pull())
    await asyncio.sleep(0)
    bench.puller.retire(bench.peer)
    await pulling
    await until(lambda: bench.pool.closed)
    with pytest.raises(PeerLost):
        await bench.pull()


async def test_a_retired_pool_with_a_pending_read_closes_once_quiet(bench):
    bench.pool.stuck = True
    with pytest.raises(ReadPending):
        await bench.pull()
    bench.puller.retire(bench.peer)
    await asyncio.sleep(0.05)
    assert not bench.pool.closed
    bench.pool.stuck = False
    await until(lambda: bench.pool.closed)


async def test_close_ends_the_running_pull_and_fails_the_queued(bench, set_faults):
    set_faults("transfer.read@1=delay:0.2")
    running, queued = (asyncio.ensure_future(bench.pull(owner="r")) for _ in range(2))
    await asyncio.sleep(0.05)
    await asyncio.to_thread(bench.puller.close)
    assert (await running).nbytes == 1024
    with pytest.raises(PeerLost, match="shutting down"):
        await queued
    with pytest.raises(PeerLost, match="shutting down"):
        await bench.pull()
    assert bench.ledger.in_flight == 0
    bench.puller.retire(bench.peer)
    assert bench.pool.closed
    assert "kv-transfer" not in [thread.name for thread in threading.enumerate()]


async def test_every_transport_pulls_verified_bytes_from_another_process(transport, region, living_owners):
    owner = living_owners[transport.name]
    quiet: list[int] = []
    puller = Puller(Ledger(quiet.extend))
    peer = DirectRanks([transport.connect(owner.offer)])
    remote, local = [9, 10, 11, 30], [0, 1, 20, 3]
    announced = [owner.checksums[i] for i in remote]
    assert (await puller.pull(peer, remote, local, announced, lease(), "r")).nbytes == 4 * region.block_nbytes

    owner.fill(11, 1)  # P gave the block to somebody else
    with pytest.raises(ChecksumMismatch, match="block 11"):
        await puller.pull(peer, remote, local, announced, lease(), "r")
    puller.retire(peer)
    await asyncio.to_thread(puller.close)


async def test_a_dead_owner_over_shm_is_a_miss_through_its_lease(region, start_owner):
    """1. D pulls from P over shm. 2. P is killed; its pages stay mapped, so reads go on. 3. P's stream
    broke, so D revoked the lease. 4. The blocks are refused although their bytes are right."""
    owner = start_owner("shm")
    puller = Puller(Ledger([].extend))
    peer = DirectRanks([ShmTransport(region).connect(owner.offer)])
    view = lease()
    owner.kill()
    view.revoke("the stream to owner broke")
    with pytest.raises(LeaseLost, match="stream to owner broke"):
        await puller.pull(peer, [0], [0], owner.checksums[:1], view, "r")
    puller.close()
    peer.close()


async def test_nixl_owner_killed_while_pulls_run(region, start_owner):
    """Pain C1: a pull after the kill fails long before its deadline, and nothing stays in flight."""
    owner = start_owner("nixl")
    transport = NixlTransport(region, "reader")
    ledger = Ledger([].extend)
    puller = Puller(ledger, timeout_s=30.0)
    peer = DirectRanks([transport.connect(owner.offer)])
    blocks = list(range(region.num_blocks))
    started = time.monotonic()
    asyncio.get_running_loop().call_later(0.2, owner.process.kill)

    async def pull_on():
        while time.monotonic() - started < 30.0:
            await puller.pull(peer, blocks, blocks, owner.checksums, lease(), "r")

    with pytest.raises(PeerLost):
        await pull_on()
    assert time.monotonic() - started < 10.0
    assert ledger.in_flight == 0
    await asyncio.to_thread(puller.close)
    transport.close()


@pytest.mark.slow
def test_nixl_read_that_cannot_end_keeps_its_blocks(start_owner, monkeypatch):
    """1. P is stopped in mid-read over TCP. 2. D's read times out; its blocks are quarantined, also
    after the pool was given up. 3. P goes on and the late bytes land. 4. Only now are they free."""
    monkeypatch.setenv("UCX_TLS", "tcp,self")
    owner = start_owner("nixl", num_blocks=8, block_nbytes=2**20)
    here = Path(__file__).parent
    done = subprocess.run(
        [sys.executable, here / "kv_tcp_reader.py", owner.offer.hex(), str(owner.pid)],
        capture_output=True,
        text=True,
        timeout=90,
        env=os.environ | {"PYTHONPATH": str(here.parent.parent)},
    )
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout)
    assert said == {
        "warm": "ChecksumMismatch",
        "pending": True,
        "refused_while_pending": True,
        "released": [],
        "reconnect": True,
        "quiet_while_stopped": [],
        "quiet": list(range(8)),
        "written_once_quiet": False,
        "written_late": True,
        "reconnected": True,
    }
