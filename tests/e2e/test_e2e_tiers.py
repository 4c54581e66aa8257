"""Blocks come back from host RAM, disk and Redis, into this life or the next, and the answer is GOLD."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest
from cluster import Cluster, Process, fresh_salt, is_gold, prompt, wait_until
from redis_process import RedisServer

BY_SOURCE = "baton_prompt_tokens_by_source_total"
CASE, TOKENS = "story-129", 128
"""Eight full blocks and one token."""


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Pools so small that another prompt pushes this one out of them; every tier below."""
    folder = tmp_path_factory.mktemp("kv")
    server = RedisServer(folder / "redis")
    try:
        with Cluster(
            num_blocks=40,
            host_cache_bytes="64MiB",
            disk_cache_bytes="200MiB",
            store_policy="write-through",
            redis_url=server.url,
            prefill_flags={"disk_cache_dir": folder / "prefill-0"},
            decode_flags={"disk_cache_dir": folder / "decode-0"},
        ) as cluster:
            yield cluster
    finally:
        server.stop()


def came_from(worker: Process) -> dict[str, float]:
    sources = ("device", "host", "disk", "redis", "prefill_worker", "computed")
    return {source: worker.metric(BY_SOURCE, source=source) for source in sources}


def ask(cluster: Cluster, plan: str, salt: str, case: str = CASE) -> dict[str, float]:
    """Answer a GOLD case rightly; returns where its prompt's KV came from."""
    d = cluster.worker("decode-0")
    before = came_from(d)
    reply = cluster.complete(prompt(case), plan=plan, cache_salt=salt, max_tokens=8)
    assert is_gold(reply, case, 8)
    after = came_from(d)
    moved = {source: after[source] - before[source] for source in after if after[source] != before[source]}
    assert sum(moved.values()) == len(prompt(case))
    reused = reply.json()["usage"]["prompt_tokens_details"]["cached_tokens"]
    assert reused == len(prompt(case)) - moved["computed"] - remote_computed(reply, moved)
    return moved


def remote_computed(reply: httpx.Response, moved: dict[str, float]) -> float:
    """What the prefill worker computed, from the answer's own account."""
    cached = reply.json()["usage"]["prompt_tokens_details"]["cached_tokens"]
    own = sum(tokens for source, tokens in moved.items() if source not in ("prefill_worker", "computed"))
    return moved.get("prefill_worker", 0) - (cached - own)


def push_out(cluster: Cluster, plan: str) -> None:
    """Other prompts take every block of the pools."""
    for _ in range(5):
        cluster.complete(prompt("story-129"), plan=plan, cache_salt=fresh_salt(), max_tokens=1)


@pytest.mark.parametrize("plan", ["local", "disaggregated"])
def test_what_the_pool_lost_comes_from_host_ram(cluster: Cluster, plan: str) -> None:
    salt = fresh_salt()
    cold = ask(cluster, plan, salt)
    assert cold == ({"computed": 129} if plan == "local" else {"prefill_worker": TOKENS, "computed": 1})
    assert ask(cluster, plan, salt) == {"device": TOKENS, "computed": 1}
    push_out(cluster, plan)
    assert ask(cluster, plan, salt) == {"host": TOKENS, "computed": 1}


def stored(worker: Process, tier: str) -> int:
    return int(worker.ready()["tiers"][tier]["store_nbytes"])


@pytest.mark.parametrize("tier", ["disk", "redis"])
def test_a_new_life_finds_what_the_old_one_stored(cluster: Cluster, tier: str) -> None:
    """1. Answer a prompt; it goes to disk and Redis. 2. kill -9. 3. The new life loads it."""
    salt, d = fresh_salt(), cluster.worker("decode-0")
    before = stored(d, tier)
    ask(cluster, "local", salt)
    wait_until(lambda: stored(d, tier) - before >= 8 * 16 * 46080, 10)
    d.kill(signal.SIGKILL)
    cluster.restart("decode-0", tier_order="host,disk,redis" if tier == "disk" else "host,redis,disk")
    assert ask(cluster, "local", salt) == {tier: TOKENS, "computed": 1}


def test_another_instance_finds_it_in_redis(cluster: Cluster) -> None:
    """P computed it once; D never saw it and does not ask P: Redis is nearer."""
    salt, p = fresh_salt(), cluster.worker("prefill-0")
    before = stored(p, "redis")
    ask(cluster, "disaggregated", salt)
    wait_until(lambda: stored(p, "redis") - before >= 8 * 16 * 46080, 10)
    cluster.restart("decode-0", disk_cache_dir="", host_cache_bytes=0)
    assert ask(cluster, "local", salt) == {"redis": TOKENS, "computed": 1}


def test_a_salt_is_a_wall(cluster: Cluster) -> None:
    ask(cluster, "local", fresh_salt())
    assert ask(cluster, "local", fresh_salt()) == {"computed": 129}


def test_a_preempted_sequence_is_swapped_in_again() -> None:
    """1. Three answers outgrow the pool together. 2. Some are preempted. 3. All end as GOLD does."""
    with Cluster(prefill=0, num_blocks=12, host_cache_bytes="64MiB") as cluster:
        d = cluster.worker("decode-0")
        with ThreadPoolExecutor(3) as pool:
            salts = [fresh_salt() for _ in range(3)]
            asked = [pool.submit(cluster.complete, prompt("story-33"), cache_salt=salt) for salt in salts]
        assert all(is_gold(each.result(), "story-33") for each in asked)
        assert d.metric("baton_num_preemptions_total") > 0
        assert d.metric("baton_kv_loads_total", sources="host+local") > 0
        cluster.wait_idle()
