"""Offers of a peer that means ill: each is refused with a reason, and nothing is opened that is no KV pool."""

from __future__ import annotations

import json
import os
import socket
import threading
from collections.abc import Iterator

import pytest
from kv_owner import make_transport

from core.errors import IncompatiblePeer, PeerLost, SourceFailed
from core.kv import KVLayout
from engine.kernels.torch_kernels import TorchKernels
from kvtransfer.offers import hosts_named
from kvtransfer.ranks import Ranks
from kvtransfer.region import Region
from kvtransfer.shm_transport import ShmTransport
from kvtransfer.transport import FakeTransport

HUGE = 10**30
CHANGES = {
    "shm": [
        {"pid": 0}, {"pid": -1}, {"pid": HUGE}, {"fd": -1}, {"pid": "self/root/etc/passwd/.."}, {"pid": 1.5},
        {"fd": "../../../etc/passwd"}, {"pid": True}, {"num_blocks": 2**62}, {"host": "a" * 10**6},
        {"incarnation": "../x"}, {"incarnation": ""}, {"incarnation": "\x1b[2J"}, {"more": 1},
    ],
    "nixl": [
        {"metadata": "zz"}, {"metadata": "00" * 2**20}, {"address": -1}, {"address": HUGE}, {"address": 0},
        {"memory": "FILE"}, {"memory": "OBJ"}, {"device": -1}, {"num_blocks": 2**40}, {"agent": ""},
        {"agent": "a" * 10**6}, {"agent": "evil\nlines"},
    ],
    "collective": [
        {"port": 0}, {"port": -1}, {"port": 2**16}, {"host": ""}, {"host": "h" * 10**6}, {"host": "a\x00b"},
        {"ticket": ""}, {"num_blocks": 0},
    ],
}  # fmt: skip


@pytest.mark.parametrize(
    ("name", "change"), [(n, c) for n, changes in CHANGES.items() for c in changes], ids=str
)
def test_an_offer_that_no_honest_peer_makes(region: Region, name: str, change: dict[str, object]) -> None:
    transport = make_transport(name, region, "reader")
    offer = json.loads(transport.offer())
    assert change.keys() <= offer.keys() or "more" in change
    hostile = json.dumps(offer | change).encode()
    with pytest.raises(SourceFailed) as caught:
        transport.connect(hostile)
    assert len(caught.value.message) < 1000
    assert caught.value.message.isprintable()
    transport.close()


def test_an_offer_nested_without_end(region: Region) -> None:
    with pytest.raises(PeerLost):
        ShmTransport(region).connect(b"[" * 10**6)


@pytest.fixture
def descriptors() -> Iterator[list[int]]:
    opened: list[int] = []
    yield opened
    for each in opened:
        os.close(each)


def test_only_kv_pools_are_opened(region: Region, descriptors: list[int]) -> None:
    """A pipe (opening it could wait for ever), a terminal, a device, a file, another memfd, an unsealed twin."""
    descriptors += [
        *os.pipe(),
        *os.openpty(),
        os.open("/dev/zero", os.O_RDONLY),
        os.open(__file__, os.O_RDONLY),
    ]
    descriptors += [os.memfd_create("other"), os.memfd_create("baton-kv")]
    transport = ShmTransport(region)
    offer = json.loads(transport.offer())
    results: list[str] = []

    def attempt() -> None:
        for fd in descriptors:
            try:
                transport.connect(json.dumps(offer | {"pid": os.getpid(), "fd": fd}).encode())
            except PeerLost as error:
                results.append(error.message)

    thread = threading.Thread(target=attempt, daemon=True)
    thread.start()
    thread.join(10)
    assert len(results) == len(descriptors)
    assert sum("is no KV pool" in each for each in results) == len(descriptors) - 1


@pytest.mark.parametrize("count", [2, 5, 300])
def test_a_number_of_ranks_that_heads_do_not_divide_into(region: Region, count: int) -> None:
    layout = KVLayout(1, 3, 64, 16, "fp32")
    own = Region.create(2, layout.block_nbytes, "own-1")
    ranks = Ranks(layout, [own], {"fake": FakeTransport}, TorchKernels())
    with pytest.raises(IncompatiblePeer, match="tensor_parallel_size"):
        ranks.connect("fake", [b"x"] * count)
    ranks.close()
    own.close()


def test_hosts_that_an_offer_names(region: Region) -> None:
    transport = make_transport("collective", region, "reader")
    offer = transport.offer()
    assert hosts_named("collective", [offer, offer.replace(b"127.0.0.1", b"10.0.0.9")]) == {
        "127.0.0.1",
        "10.0.0.9",
    }
    assert hosts_named("shm", [b"anything"]) == set()
    with pytest.raises(PeerLost):
        hosts_named("collective", [b"{}"])
    transport.close()


def test_a_collective_offer_of_a_server_that_is_not_ours(region: Region) -> None:
    """It says something else than our protocol: the reader leaves with a reason."""
    transport = make_transport("collective", region, "reader")
    with socket.create_server(("127.0.0.1", 0)) as listener:
        offer = json.loads(transport.offer()) | {"port": listener.getsockname()[1]}

        def answer() -> None:
            connection, _ = listener.accept()
            with connection:
                connection.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")
                connection.recv(4096)

        thread = threading.Thread(target=answer, daemon=True)
        thread.start()
        with pytest.raises(PeerLost, match="no worker of ours"):
            transport.connect(json.dumps(offer).encode())
        thread.join(5)
    transport.close()
