"""The collective transport against readers and owners that misbehave; what all transports share is in
test_kvtransfer_transports.py."""

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch

from core.errors import ConfigError, PeerLost
from kvtransfer import collective_transport
from kvtransfer.checksum import checksum
from kvtransfer.collective_link import READER, Control, Group
from kvtransfer.collective_transport import CollectiveTransport
from kvtransfer.device_region import DeviceRegion
from kvtransfer.region import Region

TIMEOUT_S = 30.0
SOON_S = 10.0
"""Well before TIMEOUT_S, also on a busy machine."""
HOST = "127.0.0.1"


def sums(region, ids):
    return [checksum(region.block(i)) for i in ids]


@pytest.fixture
def reader(region):
    transport = CollectiveTransport(region, HOST, HOST)
    yield transport
    transport.close()


@pytest.fixture
def owner():
    """An owner in this process: its threads serve the reader of the test."""
    region = Region.create(8, 4096, "owner-1")
    for i in range(8):
        region.block(i)[:] = bytes([i + 1]) * 4096
    transport = CollectiveTransport(region, HOST, HOST)
    yield transport
    transport.close()
    region.close()


@pytest.fixture
def small():
    region = Region.create(8, 4096, "reader-1")
    yield CollectiveTransport(region, HOST, HOST), region
    region.close()


def threads():
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("kv-collective")]


def settled(condition, timeout_s=5.0):
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "waited for too long"
        time.sleep(0.005)


def dial(owner):
    """A reader that speaks the control protocol by hand."""
    offer = json.loads(owner.offer())
    control = Control(socket.create_connection((offer["host"], offer["port"]), 5.0))
    control.send({"version": 1, "incarnation": "owner-1", "ticket": offer["ticket"]}, 5.0)
    return control


def test_more_blocks_than_fit_in_one_request_arrive(owner, small, monkeypatch):
    monkeypatch.setattr(collective_transport, "_MAX_REQUEST", 3)
    monkeypatch.setattr(collective_transport, "_MAX_IN_FLIGHT", 2)
    transport, region = small
    pool = transport.connect(owner.offer())
    pool.read([7, 6, 5, 4, 3, 2, 1, 0], list(range(8)), TIMEOUT_S)
    assert [region.block(i)[0] for i in range(8)] == [8, 7, 6, 5, 4, 3, 2, 1]
    pool.read([], [], TIMEOUT_S)
    pool.close()


def test_pools_that_are_tensors(owner):
    """The GPU's kind of region, over tensors of the CPU: the tensor decides between NCCL and Gloo."""
    blocks = torch.zeros((8, 4096), dtype=torch.uint8)
    theirs = CollectiveTransport(DeviceRegion(torch.full_like(blocks, 7), "owner-2"), HOST, HOST)
    ours = CollectiveTransport(DeviceRegion(blocks, "reader-2"), HOST, HOST)
    for offer, value in ((owner.offer(), 6), (theirs.offer(), 7)):
        pool = ours.connect(offer)
        pool.read([5], [2], TIMEOUT_S)
        assert (blocks[2] == value).all()
        pool.close()
    theirs.close()


def test_a_peer_killed_during_reads_is_lost_soon(capfd, reader, region, start_owner):
    """1. D reads from P without a pause. 2. P is killed. 3. The read fails long before its deadline, the pool
    is closed, and torch writes nothing to the terminal about it."""
    owner = start_owner("collective")
    pool = reader.connect(owner.offer)
    blocks = list(range(region.num_blocks))

    def read_on(until):
        while time.monotonic() < until:
            pool.read(blocks, blocks, TIMEOUT_S)

    threading.Timer(0.2, owner.process.kill).start()
    killed_at = time.monotonic() + 0.2
    with pytest.raises(PeerLost):
        read_on(killed_at + TIMEOUT_S)
    assert time.monotonic() - killed_at < SOON_S
    assert pool.drain()
    with pytest.raises(PeerLost, match="connect again"):
        pool.read([0], [0], TIMEOUT_S)
    assert capfd.readouterr() == ("", "")


def test_bytes_that_come_too_late_touch_no_block(reader, region, start_owner):
    """1. P is stopped. 2. D's read runs out of time: PeerLost, not pending. 3. P goes on. 4. D's blocks
    stay as they are, and D connects again."""
    owner = start_owner("collective")
    pool = reader.connect(owner.offer)
    blocks = list(range(region.num_blocks))
    owner.stop()
    started = time.monotonic()
    with pytest.raises(PeerLost) as caught:
        pool.read(blocks, blocks, 0.3)
    assert caught.type is PeerLost
    assert time.monotonic() - started < SOON_S
    assert pool.drain()
    os.kill(owner.pid, signal.SIGCONT)
    again = reader.connect(owner.offer)  # by now P has heard of the read that was given up
    assert not any(region.data)
    again.read([3], [4], TIMEOUT_S)
    assert sums(region, [4]) == owner.checksums[3:4]
    again.close()


def test_a_peer_that_is_stopped_while_connecting_is_lost_in_time(reader, start_owner, monkeypatch):
    monkeypatch.setattr(collective_transport, "CONNECT_TIMEOUT_S", 0.3)
    owner = start_owner("collective")
    owner.stop()
    started = time.monotonic()
    with pytest.raises(PeerLost):
        reader.connect(owner.offer)
    assert time.monotonic() - started < SOON_S


def test_a_restarted_owner_on_the_same_port_refuses(owner, small):
    transport, _ = small
    with pytest.raises(PeerLost, match=r"refuses to be read.*incarnation 'owner-1', not 'owner-0'"):
        transport.connect(owner.offer().replace(b"owner-1", b"owner-0"))


@pytest.mark.parametrize("ticket", ["", "0" * 32, "\u00e9"])
def test_who_was_not_given_the_offer_reads_nothing(owner, small, ticket):
    transport, _ = small
    offer = json.loads(owner.offer())
    with pytest.raises(PeerLost):
        transport.connect(json.dumps(offer | {"ticket": ticket}).encode())
    transport.connect(owner.offer()).close()


def test_the_number_of_readers_is_bounded(owner, small, monkeypatch):
    monkeypatch.setattr(collective_transport, "MAX_READERS", 2)
    transport, region = small
    pools = [transport.connect(owner.offer()) for _ in range(2)]
    with pytest.raises(PeerLost, match="serves 2 readers already"):
        transport.connect(owner.offer())
    pools[0].close()
    settled(lambda: len(threads()) == 2)  # the one that accepts, and one reader's
    pool = transport.connect(owner.offer())
    pool.read([5], [1], TIMEOUT_S)
    assert region.block(1)[0] == 6
    pool.close()
    pools[1].close()


@pytest.mark.parametrize(
    "request_body",
    [{}, {"blocks": 3}, {"blocks": [8]}, {"blocks": [-1]}, {"blocks": ["0"]}, {"blocks": [0] * 1025}],
)
def test_a_reader_that_asks_for_nonsense_is_dropped(owner, small, request_body):
    control = dial(owner)
    group = Group(control, READER, torch.from_numpy(small[1].blocks), 5.0)
    control.send(request_body, 5.0)
    with pytest.raises(PeerLost, match="closed its connection"):
        control.receive(5.0)
    with pytest.raises(PeerLost, match="link to the peer failed"):
        group.wait(group.receive(torch.empty(4096, dtype=torch.uint8)), time.monotonic() + 5.0)
    control.close()
    settled(lambda: len(threads()) == 1)


def test_strangers_on_the_port_disturb_nobody(owner, small):
    transport, _ = small
    offer = json.loads(owner.offer())
    for said in (b"GET / HTTP/1.1\r\n\r\n", b"\x02\x00\x00\x00[]", b"\x05\x00\x00\x00{not}", b""):
        stranger = socket.create_connection((offer["host"], offer["port"]), 5.0)
        stranger.sendall(said)
        stranger.close()
    pool = transport.connect(owner.offer())
    pool.read([0], [0], TIMEOUT_S)
    pool.close()


def test_closing_the_owner_ends_its_threads_and_its_readers(owner, small):
    transport, _ = small
    pool = transport.connect(owner.offer())
    owner.close()
    owner.close()
    assert threads() == []
    with pytest.raises(PeerLost):
        pool.read([0], [0], TIMEOUT_S)


def test_an_address_that_cannot_be_listened_on_names_the_flag(region):
    with pytest.raises(ConfigError, match=r"cannot listen on 192\.0\.2\.1.*choose another --listen"):
        CollectiveTransport(region, "192.0.2.1", "192.0.2.1").offer()


LEAVES = """
import sys
from kvtransfer.collective_transport import CollectiveTransport
from kvtransfer.region import Region

owner = CollectiveTransport(Region.create(2, 64, "owner"), "127.0.0.1", "127.0.0.1")
pool = CollectiveTransport(Region.create(2, 64, "reader"), "127.0.0.1", "127.0.0.1").connect(owner.offer())
pool.read([0], [1], 10.0)
if sys.argv[1] == "closed":
    pool.close()
    owner.close()
"""


@pytest.mark.parametrize("how", ["closed", "open"])
def test_a_process_leaves_without_a_crash(how):
    """A thread inside torch's destructors while Python ends would abort the process."""
    root = str(Path(__file__).parent.parent.parent)
    done = subprocess.run(
        [sys.executable, "-c", LEAVES, how],
        capture_output=True,
        text=True,
        timeout=60,
        env=os.environ | {"PYTHONPATH": root},
    )
    assert (done.returncode, done.stderr) == (0, "")
