"""Rank 0 and the others: their messages, how they start, how they end."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Iterator

import pytest
import torch

from core.errors import ConfigError, WorkerLost
from core.kv import KVLayout
from core.settings import Settings
from kvtransfer.region import Region
from services.worker.rank_link import COPY, POOL, Kind, Link, silence_limit_s
from services.worker.ranks import RankProcesses

LAYOUT = KVLayout(num_layers=30, num_kv_heads=3, head_dim=64, block_size=16, kv_dtype="fp32")


@pytest.fixture
def link() -> Iterator[tuple[Link, Link]]:
    ends = socket.socketpair()
    links = Link(ends[0], timeout_s=0.1), Link(ends[1], timeout_s=0.1)
    yield links
    for each in links:
        each.close()


class TestLink:
    def test_messages_arrive_whole_and_in_order(self, link: tuple[Link, Link]):
        ours, theirs = link
        body = bytes(range(256)) * 40
        ours.send(Kind.RUN, body)
        ours.send(Kind.COPY, COPY.pack(3, 4))
        ours.send(Kind.JOIN)
        assert theirs.receive(1.0) == (Kind.RUN, body, None)
        second, third = theirs.receive(1.0), theirs.receive(1.0)
        assert second is not None
        assert COPY.unpack(second.body) == (3, 4)
        assert third == (Kind.JOIN, b"", None)

    def test_a_pool_is_one_memory_in_both(self, link: tuple[Link, Link]):
        """What a rank stores is what the leader hands over, and the other way round."""
        ours, theirs = link
        region = Region.create(4, 64, "life/1")
        ours.send(Kind.POOL, POOL.pack(region.num_blocks), region.fd)
        frame = theirs.receive(1.0)
        assert frame is not None
        assert frame.fd is not None
        adopted = Region.adopt(frame.fd, *POOL.unpack(frame.body), region.block_nbytes)
        adopted.block(2)[:4] = b"\1\2\3\4"
        region.block(3)[:2] = b"\5\6"
        assert bytes(region.block(2)[:4]) == b"\1\2\3\4"
        assert bytes(adopted.block(3)[:2]) == b"\5\6"
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(frame.fd)
        assert len(adopted.data) == len(region.data) == 4 * 64
        adopted.close()
        region.close()

    def test_the_end_of_the_other_side(self, link: tuple[Link, Link]):
        ours, theirs = link
        theirs.close()
        theirs.close()
        assert ours.receive(1.0) is None
        with pytest.raises(WorkerLost, match="is gone"):
            ours.send(Kind.JOIN)

    def test_silence_and_deafness_have_a_bound(self, link: tuple[Link, Link]):
        ours, _ = link
        began = time.monotonic()
        with pytest.raises(WorkerLost, match="stayed silent"):
            ours.receive(0.05)
        with pytest.raises(WorkerLost, match="is gone"):
            ours.send(Kind.RUN, bytes(10**7))
        assert time.monotonic() - began < 5

    def test_half_a_message(self):
        ours, theirs = socket.socketpair()
        theirs.sendall(b"\x10\0\0\0\6half")
        theirs.close()
        with pytest.raises(WorkerLost, match="in the middle"):
            Link(ours).receive(1.0)
        ours.close()


def test_ranks_on_gpus_compile_in_their_first_steps():
    settings = Settings(step_timeout_s=5.0, start_timeout_s=60.0)
    assert [silence_limit_s(settings, kind) for kind in ("cpu", "cuda")] == [5.0, 60.0]


def processes(**values: object) -> RankProcesses:
    settings = Settings.model_validate({"tensor_parallel_size": 3, "cpu_threads": 1} | values)
    return RankProcesses(settings, LAYOUT, "fp32", 128, torch.device("cpu"))


class TestProcesses:
    def test_what_a_rank_refuses_is_told_in_its_words(self):
        ranks = processes(model="/nowhere")
        try:
            with pytest.raises(ConfigError, match="--model takes a GGUF file"):
                ranks.join()
        finally:
            ranks.kill()

    def test_a_rank_that_dies_while_it_loads(self):
        ranks = processes()
        try:
            os.kill(ranks.pids[0], 9)
            with pytest.raises(ConfigError, match=r"rank 1 ended with signal 9 \(SIGKILL\) while it loaded"):
                ranks.join()
            assert ranks.lost == "rank 1 ended with signal 9 (SIGKILL)"
        finally:
            ranks.kill()

    def test_a_start_has_a_bound(self):
        ranks = processes(start_timeout_s=0.05)
        try:
            with pytest.raises(ConfigError, match="--start-timeout-s"):
                ranks.join()
        finally:
            ranks.kill()

    def test_an_end_that_was_asked_for_is_no_loss(self):
        ranks = processes()
        pids = ranks.pids
        ranks.kill()
        ranks.close()
        assert ranks.lost == ""
        assert not any(os.path.exists(f"/proc/{pid}") for pid in pids)
