import gc
import os
import subprocess
import sys

import numpy as np
import pytest

from core.errors import ConfigError, PeerLost
from kvtransfer import memory
from kvtransfer.region import PAGE_NBYTES, Region


def open_fds() -> int:
    return len(os.listdir("/proc/self/fd"))


def test_owner_and_attached_region_share_bytes():
    owner = Region.create(4, 1000, "a")
    peer = Region.attach(owner.pid, owner.fd, "a")
    owner.block(2)[:] = b"x" * 1000
    assert (peer.num_blocks, peer.block_nbytes) == (4, 1000)
    assert bytes(peer.block(2)) == b"x" * 1000
    assert bytes(peer.block(3)) == bytes(1000)
    assert owner.address % PAGE_NBYTES == 0
    assert owner.address + 2000 == np.frombuffer(owner.block(2), np.uint8).ctypes.data
    assert len(owner.data) == 4000
    peer.close()
    owner.close()


def test_a_peer_cannot_write():
    owner = Region.create(1, 8, "a")
    peer = Region.attach(owner.pid, owner.fd, "a")
    with pytest.raises(TypeError):
        peer.block(0)[0] = 1
    peer.close()
    owner.close()


def test_nobody_can_shrink_it_under_a_reader():
    owner = Region.create(4, PAGE_NBYTES, "a")
    with pytest.raises(OSError):
        os.ftruncate(owner.fd, PAGE_NBYTES)
    owner.close()


def test_attach_refuses_another_incarnation():
    owner = Region.create(1, 8, "new")
    with pytest.raises(PeerLost, match=r"incarnation 'new', not 'old'.*restarted"):
        Region.attach(owner.pid, owner.fd, "old")
    owner.close()


def test_attach_refuses_a_process_that_ended():
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait(10)
    with pytest.raises(PeerLost, match=f"process {ended.pid}.*ended.*--transport nixl"):
        Region.attach(ended.pid, 3, "a")


@pytest.mark.parametrize("content", [b"", b"some other file" * 1000])
def test_attach_refuses_a_reused_pid(tmp_path, content):
    path = tmp_path / "other"
    path.write_bytes(content)
    with path.open("rb") as other, pytest.raises(PeerLost, match="reused"):
        Region.attach(os.getpid(), other.fileno(), "a")


def test_attach_after_the_owner_closed_is_peer_lost():
    owner = Region.create(1, 8, "a")
    fd = owner.fd
    owner.close()
    with pytest.raises(PeerLost):
        Region.attach(os.getpid(), fd, "a")


def test_too_large_a_pool_names_both_sizes_and_the_remedy():
    with pytest.raises(ConfigError, match=r"needs 95,367,432 MiB and only [\d,]+ MiB are free.*--num-blocks"):
        Region.create(10**6, 10**8, "a")


@pytest.mark.parametrize("incarnation", ["", "x" * 65])
def test_an_incarnation_must_fit_the_header(incarnation):
    with pytest.raises(ConfigError, match="1 to 64 bytes"):
        Region.create(1, 8, incarnation)


def test_close_is_idempotent_and_spares_views_in_use():
    region = Region.create(2, 8, "a")
    blocks = region.blocks
    region.close()
    region.close()
    blocks[1] = 7
    assert blocks.sum() == 56
    with pytest.raises(ValueError, match="closed"):
        _ = region.data


@pytest.mark.parametrize("index", [-1, 2])
def test_a_block_outside_the_pool_is_an_error(index):
    region = Region.create(2, 8, "a")
    with pytest.raises(IndexError, match=f"block {index} of a pool of 2"):
        region.block(index)
    region.close()


def test_no_descriptor_leaks():
    gc.collect()
    before = open_fds()
    for _ in range(20):
        owner = Region.create(2, 8, "a")
        with pytest.raises(PeerLost):
            Region.attach(owner.pid, owner.fd, "b")
        peer = Region.attach(owner.pid, owner.fd, "a")
        array = peer.blocks
        peer.close()
        owner.close()
        del array
    gc.collect()
    assert open_fds() == before


@pytest.mark.parametrize(
    ("limit", "expected"), [("max", 1000 * 1024), ("5000", 5000 - 3000 + 500), ("9000000", 1000 * 1024)]
)
def test_available_memory_is_the_smaller_of_machine_and_container(tmp_path, monkeypatch, limit, expected):
    (tmp_path / "memory.max").write_text(limit)
    (tmp_path / "memory.current").write_text("3000")
    (tmp_path / "memory.stat").write_text("anon 1\nactive_file 200\ninactive_file 300\n")
    monkeypatch.setattr(memory, "_own_cgroup", lambda: tmp_path)
    numbers = memory._numbers
    monkeypatch.setattr(
        memory, "_numbers", lambda p: {"MemAvailable": 1000} if p.name == "meminfo" else numbers(p)
    )
    assert memory.available_nbytes() == expected


def test_available_memory_without_cgroups_is_the_machines(tmp_path, monkeypatch):
    monkeypatch.setattr(memory, "_own_cgroup", lambda: tmp_path)
    assert memory.available_nbytes() > 2**20
