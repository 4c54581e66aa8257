"""Blocks come back from host RAM, disk and Redis, into this life or the next, and the answer is GOLD."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from cluster import Cluster, fresh_salt, is_gold, prompt, wait_until
from redis import Redis
from redis_process import RedisServer
from tier_probes import ask, block_files, chain, is_from, push_out

CASE, NUM_BLOCKS = "story-129", 8
"""Eight full blocks and one token."""

POOL_BLOCKS = 40


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """A pool so small that other prompts push this one out of it; every tier below. The prefill worker
    keeps nothing: what it held would be as near as host RAM is."""
    folder = tmp_path_factory.mktemp("kv")
    server = RedisServer(folder / "redis")
    try:
        with Cluster(
            num_blocks=POOL_BLOCKS,
            prefill_flags={"enable_prefix_caching": False},
            decode_flags={
                "host_cache_bytes": "64MiB",
                "disk_cache_dir": folder / "decode-0",
                "disk_cache_bytes": "200MiB",
                "redis_url": server.url,
                "store_policy": "write-through",
            },
        ) as cluster:
            yield cluster
    finally:
        server.stop()


@pytest.mark.parametrize("plan", ["local", "disaggregated"])
def test_what_the_pool_lost_comes_from_host_ram(cluster: Cluster, plan: str) -> None:
    salt, reusable = fresh_salt(), NUM_BLOCKS * 16
    cold = ask(cluster, salt, CASE, plan)
    assert cold == ({"computed": 129} if plan == "local" else {"prefill_worker": reusable, "computed": 1})
    assert is_from(ask(cluster, salt, CASE, plan), "device", CASE)
    push_out(cluster, POOL_BLOCKS)
    assert is_from(ask(cluster, salt, CASE, plan), "host", CASE)


def test_a_salt_is_a_wall(cluster: Cluster) -> None:
    ask(cluster, fresh_salt(), CASE)
    assert ask(cluster, fresh_salt(), CASE) == {"computed": 129}


def test_the_router_lists_what_each_tier_holds(cluster: Cluster) -> None:
    d = cluster.worker("decode-0")
    store(cluster, fresh_salt())

    def tiers() -> dict[str, dict[str, Any]]:
        return next(listed["tiers"] for listed in cluster.cluster() if listed["pid"] == d.pid)

    files = block_files(Path(str(d.flags["disk_cache_dir"])))
    wait_until(lambda: tiers()["disk"]["blocks"] == len(files), 5, lambda: str(tiers()))
    host, redis = tiers()["host"], tiers()["redis"]
    assert 0 < host["used_bytes"] <= host["capacity_bytes"] <= 64 * 2**20
    assert redis["breaker"] == "closed"


def test_a_preempted_sequence_is_swapped_in_again(cluster: Cluster) -> None:
    """1. Answers whose prompts fill the pool outgrow it.  2. Some are preempted.  3. All end as GOLD does."""
    case, at_once, d = "story-65", POOL_BLOCKS // 5, cluster.worker("decode-0")
    preempted = d.metric("baton_num_preemptions_total")
    with ThreadPoolExecutor(at_once) as pool:
        asked = [
            pool.submit(cluster.complete, prompt(case), plan="local", cache_salt=fresh_salt())
            for _ in range(at_once)
        ]
    assert all(is_gold(each.result(), case) for each in asked)
    assert d.metric("baton_num_preemptions_total") > preempted
    assert d.metric("baton_kv_loads_total", sources="host+local") > 0


def test_a_new_life_finds_what_the_old_one_stored(cluster: Cluster) -> None:
    """1. Two prompts go to disk and Redis.  2. kill -9, and the second one's files are deleted.
    3. The next life, in which Python hashes strings otherwise, loads one from disk, the other from Redis."""
    d = cluster.worker("decode-0")
    directory = Path(str(d.flags["disk_cache_dir"]))
    on_disk, in_redis = fresh_salt(), fresh_salt()
    store(cluster, on_disk)
    files = block_files(directory)
    store(cluster, in_redis)
    d.kill(signal.SIGKILL)
    for file in block_files(directory) - files:
        file.unlink()
    d.env = {"PYTHONHASHSEED": "1"}
    cluster.restart("decode-0")
    assert is_from(ask(cluster, on_disk, CASE), "disk", CASE)
    assert is_from(ask(cluster, in_redis, CASE), "redis", CASE)


def store(cluster: Cluster, salt: str) -> None:
    """Answer the case; returns once disk and Redis hold it."""
    d = cluster.worker("decode-0")
    directory, client = Path(str(d.flags["disk_cache_dir"])), Redis.from_url(str(d.flags["redis_url"]))
    ask(cluster, salt, CASE)
    hashes = {h.hex() for h in chain(CASE, salt)}

    def stored() -> bool:
        keys = {key.decode().rpartition(":")[2] for key in client.scan_iter("baton:kv:*")}
        return hashes <= keys and hashes <= {file.stem for file in block_files(directory)}

    wait_until(stored, 20)
