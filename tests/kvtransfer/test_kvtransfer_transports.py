"""Every transport against a real owner in another process (`kv_owner.py`)."""

import gc
import os
import threading
import time
from pathlib import Path

import pytest

from core.errors import ConfigError, IncompatiblePeer, PeerLost
from kvtransfer import nixl_transport
from kvtransfer.checksum import checksum
from kvtransfer.nixl_transport import NixlTransport
from kvtransfer.region import Region
from kvtransfer.shm_transport import ShmTransport, runs
from kvtransfer.transport import choose

TIMEOUT_S = 30.0
SOON_S = 10.0
"""Well before TIMEOUT_S, also on a busy machine."""


def sums(region, ids):
    return [checksum(region.block(i)) for i in ids]


def test_bytes_arrive_in_the_right_blocks(transport, region, living_owners):
    owner = living_owners[transport.name]
    pool = transport.connect(owner.offer)
    remote, local = [3, 4, 5, 9, 31, 0], [10, 11, 12, 2, 7, 31]
    pool.read(remote, local, TIMEOUT_S)
    assert sums(region, local) == [owner.checksums[i] for i in remote]
    untouched = sorted(set(range(region.num_blocks)) - set(local))
    assert not any(any(region.block(i)) for i in untouched)

    owner.fill(3, 0xAB)
    pool.read([3], [10], TIMEOUT_S)
    assert bytes(region.block(10)) == b"\xab" * region.block_nbytes
    assert pool.drain()
    pool.close()


@pytest.mark.parametrize(
    ("remote", "local", "reason"),
    [
        ([32], [0], "block 32 is outside the peer's pool of 32"),
        ([0], [32], "block 32 is outside our pool"),
        ([-1], [0], "block -1 is outside the peer's"),
        ([0, 1], [0], "2 blocks of the peer cannot fill 1"),
    ],
)
def test_a_read_outside_a_pool_is_refused(region, living_owners, remote, local, reason):
    owner = living_owners["shm"]
    pool = ShmTransport(region).connect(owner.offer)
    with pytest.raises(PeerLost, match=reason):
        pool.read(remote, local, TIMEOUT_S)
    pool.close()


def test_a_closed_pool_reads_nothing_and_can_be_connected_again(transport, region, living_owners):
    owner = living_owners[transport.name]
    pool = transport.connect(owner.offer)
    pool.close()
    pool.close()
    assert pool.drain()
    with pytest.raises(PeerLost, match="connect again"):
        pool.read([0], [0], TIMEOUT_S)
    pool = transport.connect(owner.offer)
    pool.read([1], [0], TIMEOUT_S)
    assert sums(region, [0]) == owner.checksums[1:2]
    pool.close()


def test_a_peer_killed_before_connect_is_lost_soon(transport, start_owner):
    owner = start_owner(transport.name)
    owner.kill()
    transport.offer()  # starts the agent
    started = time.monotonic()
    with pytest.raises(PeerLost):
        transport.connect(owner.offer).read([0], [0], TIMEOUT_S)
    assert time.monotonic() - started < SOON_S


def test_nixl_notices_a_peer_killed_during_reads(capfd, region, start_owner):
    """1. D reads from P without a pause. 2. P is killed. 3. The read fails long before its deadline, and the
    libraries below write nothing to the terminal about it."""
    transport = NixlTransport(region, "reader")
    owner = start_owner("nixl")
    pool = transport.connect(owner.offer)
    blocks = list(range(region.num_blocks))

    def read_on(until):
        while time.monotonic() < until:
            pool.read(blocks, blocks, TIMEOUT_S)

    threading.Timer(0.2, owner.process.kill).start()
    killed_at = time.monotonic() + 0.2
    with pytest.raises(PeerLost, match="reading from owner/life-1 failed"):
        read_on(killed_at + TIMEOUT_S)
    assert time.monotonic() - killed_at < SOON_S
    assert pool.drain()
    pool.close()
    transport.close()
    transport.close()
    assert capfd.readouterr() == ("", "")


def test_shm_outlives_its_owner(region, start_owner):
    """A mapped memfd stays readable after kill -9: here only the lease tells that the peer is gone."""
    owner = start_owner("shm")
    pool = ShmTransport(region).connect(owner.offer)
    owner.kill()
    pool.read([7], [8], TIMEOUT_S)
    assert sums(region, [8]) == owner.checksums[7:8]
    pool.close()


def test_a_restarted_peer_has_another_life(transport, region, start_owner):
    first = start_owner(transport.name, "life-1")
    old = transport.connect(first.offer)
    first.kill()
    second = start_owner(transport.name, "life-2")
    new = transport.connect(second.offer)
    old.close()
    new.read([4], [5], TIMEOUT_S)
    assert sums(region, [5]) == second.checksums[4:5]
    new.close()


def test_blocks_of_another_size_are_refused(transport, region):
    offer = transport.offer().replace(b'"block_nbytes": 65536', b'"block_nbytes": 4096')
    with pytest.raises(IncompatiblePeer, match="block_nbytes: 65536 here, 4096 there"):
        transport.connect(offer)


def test_an_offer_that_is_not_one_is_refused(transport):
    offer = transport.offer()
    for damaged in (
        b"",
        b"\xff\xfe",
        b"[]",
        b"{}",
        b'{"version": 1}',
        offer[:-2],
        offer.replace(b"32", b'"x"'),
    ):
        with pytest.raises(PeerLost):
            transport.connect(damaged)
    with pytest.raises(IncompatiblePeer, match="offer version"):
        transport.connect(offer.replace(b'"version": 1', b'"version": 2'))


def test_shm_to_another_host_says_what_to_use(region, monkeypatch):
    transport = ShmTransport(region)
    offer = transport.offer()
    monkeypatch.setattr("kvtransfer.shm_transport.host_id", lambda: "another boot")
    with pytest.raises(PeerLost, match=r"another host.*--transport nixl"):
        transport.connect(offer)


def test_shm_to_another_incarnation_is_lost(region):
    transport = ShmTransport(region)
    with pytest.raises(PeerLost, match="restarted"):
        transport.connect(transport.offer().replace(b"reader-1", b"reader-0"))


@pytest.mark.slow
def test_connections_leak_no_descriptors(transport, start_owner):
    """Counted after the peer's death: until then UCX keeps a socket per connection given up."""
    counts = []
    for connections in (1, 5):
        owner = start_owner(transport.name)
        for _ in range(connections):
            pool = transport.connect(owner.offer)
            pool.read([0], [0], TIMEOUT_S)
            pool.close()
        owner.close()
        gc.collect()
        counts.append(settled(lambda: len(os.listdir("/proc/self/fd"))))
    assert counts[1] <= counts[0]


def settled(count):
    """The count once it has not changed for a while, as sockets close behind our back."""
    before = None
    while (now := count()) != before:
        before = now
        time.sleep(0.3)
    return now


def test_memory_stays_mapped_while_nixl_may_write_it():
    region = Region.create(4, 2**20, "mapped")
    before = mapped_regions()
    transport = NixlTransport(region, "mapped")
    transport.offer()
    region.close()
    assert mapped_regions() == before
    transport.close()
    gc.collect()
    assert mapped_regions() == before - 1


def mapped_regions():
    return Path("/proc/self/maps").read_text().count("memfd:baton-kv")


def test_an_idle_nixl_agent_leaves_the_cores_alone(region):
    """NIXL's progress thread spins by default, which on a small machine takes a core from the model."""
    transport = NixlTransport(region, "idle")
    transport.offer()
    used = time.process_time()
    time.sleep(0.5)
    assert time.process_time() - used < 0.1
    transport.close()


def test_missing_nixl_says_how_to_install_it(region, monkeypatch):
    def missing(_name):
        raise ImportError("No module named 'nixl'")

    monkeypatch.setattr(nixl_transport.importlib, "import_module", missing)
    with pytest.raises(ConfigError, match=r"needs NIXL.*pip install --no-deps nixl nixl-cu12"):
        NixlTransport(region, "w").offer()


@pytest.mark.parametrize(
    ("remote", "local", "expected"),
    [
        ([], [], []),
        ([4], [9], [(4, 9, 1)]),
        ([4, 5, 6], [1, 2, 3], [(4, 1, 3)]),
        ([4, 5, 6], [1, 2, 9], [(4, 1, 2), (6, 9, 1)]),
        ([4, 6, 7], [1, 2, 3], [(4, 1, 1), (6, 2, 2)]),
        ([7, 6], [2, 1], [(7, 2, 1), (6, 1, 1)]),
    ],
)
def test_adjacent_blocks_are_copied_in_one_run(remote, local, expected):
    assert list(runs(remote, local)) == expected


@pytest.mark.parametrize(
    ("setting", "ours", "theirs", "expected"),
    [
        ("auto", ["shm", "nixl"], ["nixl", "shm"], ["shm", "nixl"]),
        ("auto", ["shm", "nixl"], ["nixl"], ["nixl"]),
        ("auto", ["shm"], ["shm", "nixl"], ["shm"]),
        ("shm", ["shm"], ["shm", "nixl"], ["shm"]),
        ("nixl", ["nixl"], ["shm", "nixl"], ["nixl"]),
        ("collective", ["collective"], ["shm", "collective"], ["collective"]),
    ],
)
def test_choice_of_transport(setting, ours, theirs, expected):
    assert choose(setting, ours, theirs) == expected


def test_no_transport_in_common_names_both_sides():
    with pytest.raises(PeerLost, match="--transport nixl runs nixl here, the peer offers shm; start both"):
        choose("nixl", ["nixl"], ["shm"])
    with pytest.raises(PeerLost, match="the peer offers nothing"):
        choose("auto", ["nixl"], [])


def test_an_unknown_transport_lists_the_known():
    with pytest.raises(ConfigError, match="'rdma' is not known; choose auto, shm, nixl, collective"):
        choose("rdma", ["shm"], ["shm"])


def test_a_region_offered_by_the_reader_itself_works(region):
    """Loopback: a worker may read its own blocks through shm, e.g. when P and D are one process."""
    own = Region.attach(region.pid, region.fd, region.incarnation)
    region.block(0)[:4] = b"self"
    assert bytes(own.block(0)[:4]) == b"self"
    own.close()
