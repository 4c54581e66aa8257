"""Workers of several tensor-parallel ranks: the answer is GOLD, also between degrees; a lost rank is a lost
worker, said clearly and soon."""

from __future__ import annotations

import os
import signal
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest
from cluster import Cluster, Process, fresh_salt, is_gold, prompt, wait_until
from tier_probes import ask, block_files, chain, is_from, push_out

BYTES_PER_TOKEN = 2 * 30 * 3 * 64 * 4  # K and V, layers, KV heads, head dim, fp32
MOVED = "baton_kv_transfer_bytes_total"
STEP_TIMEOUT_S = 4.0
POOL_BLOCKS = 64
CASE = "story-129"


def split_worker(**flags: object) -> Cluster:
    """One decode worker of three ranks, and a router."""
    return Cluster(prefill=0, tensor_parallel_size=3, num_blocks=POOL_BLOCKS, resume_timeout_s=0.5, **flags)


def ranks_of(worker: Process) -> list[psutil.Process]:
    found = psutil.Process(worker.pid).children()
    return [child for child in found if "services.worker.rank" in child.cmdline()]


def all_gone(ranks: list[psutil.Process]) -> bool:
    return not any(rank.is_running() and rank.status() != psutil.STATUS_ZOMBIE for rank in ranks)


def test_three_ranks_give_gold_and_end_with_one_of_them():
    """1. A worker of three ranks answers as one does.  2. In mid-stream a rank is killed.  3. The stream
    ends with an error that says so.  4. The worker exits 1, and no rank is left."""
    with split_worker() as cluster:
        worker = cluster.worker("decode-0")
        footprint, ranks = worker.ready()["footprint"], ranks_of(worker)
        assert (footprint["tensor_parallel_size"], len(ranks)) == (3, 2)
        assert footprint["bytes_per_token"] == BYTES_PER_TOKEN
        assert is_gold(cluster.complete(prompt("story-33"), max_tokens=6), "story-33", 6)
        with cluster.stream(prompt("story-33"), max_tokens=500, ignore_eos=True) as events:
            next(events)
            os.kill(ranks[1].pid, signal.SIGKILL)
            error = next(event["error"] for event in events if "error" in event)
        assert error["code"] == "worker_lost"
        assert worker.wait_end(10) == 1
        wait_until(lambda: all_gone(ranks), 5)


@pytest.mark.slow
@pytest.mark.parametrize(("prefill", "decode"), [(3, 1), (1, 3), (3, 3)])
def test_blocks_move_between_degrees(prefill: int, decode: int):
    """Whole and parts of prompts, cold and cached: P's heads land where D's attention looks for them."""
    with Cluster(
        transport="shm",
        num_blocks=128,
        max_num_batched_tokens=64,
        prefill_flags={"tensor_parallel_size": prefill},
        decode_flags={"tensor_parallel_size": decode},
    ) as cluster:
        d = cluster.worker("decode-0")
        salt = fresh_salt()
        for name, moved in (("story-128", 112), ("story-128", 0), ("story-500", 496 - 128)):
            before = d.metric(MOVED)
            reply = cluster.complete(prompt(name), plan="disaggregated", cache_salt=salt, max_tokens=8)
            assert is_gold(reply, name, 8)
            assert d.metric(MOVED) - before == moved * BYTES_PER_TOKEN
        assert d.metric("baton_kv_transfer_failures_total") == 0
        cluster.wait_idle()


@pytest.mark.slow
def test_choices_fork_in_every_rank():
    """The tail block that choices share is copied in each rank's pool: seeded choices are those of one rank."""
    ask = {"n": 2, "temperature": 1.0, "seed": 5, "max_tokens": 8}
    answers = []
    for degree in (1, 3):
        with Cluster(prefill=0, tensor_parallel_size=degree, num_blocks=64) as cluster:
            reply = cluster.complete(prompt("story-33"), **ask)
            answers.append([choice["token_ids"] for choice in reply.json()["choices"]])
    assert answers[0] == answers[1]


@pytest.mark.slow
def test_a_rank_that_dies_while_nothing_runs_ends_the_worker():
    """A router that has not heard of it yet says that the worker is lost."""
    with split_worker() as cluster:
        worker = cluster.worker("decode-0")
        ranks = ranks_of(worker)
        os.kill(ranks[0].pid, signal.SIGKILL)
        assert worker.wait_end(5) == 1
        wait_until(lambda: all_gone(ranks), 5)
        assert "rank 1 ended with signal 9" in worker.log.read_text()
        assert cluster.complete(prompt("story-33"), max_tokens=1).status_code == 503


@pytest.mark.slow
def test_a_rank_of_the_prefill_worker_dies_during_the_handoff(background: ThreadPoolExecutor):
    """1. D pulls a prompt's blocks while P's ranks make them.  2. One of these is killed.  3. P exits 1; D keeps
    what it has, computes the rest, and the answer is GOLD."""
    split = {"tensor_parallel_size": 3, "max_num_batched_tokens": 32}
    with Cluster(transport="shm", num_blocks=128, prefill_flags=split) as cluster:
        p, d = cluster.worker("prefill-0"), cluster.worker("decode-0")
        reply = background.submit(cluster.complete, prompt("story-500"), plan="disaggregated", max_tokens=4)
        wait_until(lambda: p.stats()["steps"] >= 3, 20)
        os.kill(ranks_of(p)[0].pid, signal.SIGKILL)
        assert is_gold(reply.result(), "story-500", 4)
        assert p.wait_end(10) == 1
        assert d.metric("baton_kv_transfer_failures_total") == 1
        assert 0 < d.metric(MOVED) < 496 * BYTES_PER_TOKEN


@pytest.mark.slow
def test_a_rank_that_hangs_ends_the_worker(background: ThreadPoolExecutor):
    """1. A rank stops without dying.  2. A request waits for it, at most --step-timeout-s.  3. It fails, the
    worker exits 1, the stopped rank is gone too."""
    with split_worker(step_timeout_s=STEP_TIMEOUT_S) as cluster:
        worker = cluster.worker("decode-0")
        ranks = ranks_of(worker)
        os.kill(ranks[0].pid, signal.SIGSTOP)
        reply = background.submit(cluster.complete, prompt("story-33"), max_tokens=4)
        assert reply.result(STEP_TIMEOUT_S + 15).status_code == 503
        assert worker.wait_end(10) == 1
        wait_until(lambda: all_gone(ranks), 5)


@pytest.mark.slow
def test_ranks_end_with_a_worker_that_is_killed():
    with split_worker() as cluster:
        worker = cluster.worker("decode-0")
        ranks = ranks_of(worker)
        os.kill(ranks[0].pid, signal.SIGSTOP)
        worker.kill()
        wait_until(lambda: all_gone(ranks), 5)


@pytest.mark.slow
@pytest.mark.timeout(300)  # three lives of a worker
def test_one_rank_loads_what_three_have_stored(tmp_path: Path):
    """1. A prompt's blocks leave the pool of three ranks, and come back from host RAM.  2. kill -9; the next life
    has one rank and finds them on the disk, and the other way round."""
    disk = tmp_path / "kv"
    tiers = {"host_cache_bytes": "64MiB", "disk_cache_dir": disk, "disk_cache_bytes": "200MiB"}
    with split_worker(store_policy="write-through", **tiers) as cluster:
        d = cluster.worker("decode-0")
        for degree in (1, 3):
            salt = fresh_salt()
            assert ask(cluster, salt, CASE) == {"computed": 129}
            push_out(cluster, POOL_BLOCKS)
            assert is_from(ask(cluster, salt, CASE), "host", CASE)
            wanted = {block_hash.hex() for block_hash in chain(CASE, salt)}
            wait_until(lambda wanted=wanted: wanted <= {file.stem for file in block_files(disk)}, 20)
            d.kill(signal.SIGKILL)
            cluster.restart("decode-0", tensor_parallel_size=degree)
            assert is_from(ask(cluster, salt, CASE), "disk", CASE)
