"""GOLD's tokens from every tier, on the decode worker and on the prefill worker, and after a swap."""

from __future__ import annotations

import signal
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import pytest
from cluster import Cluster, Process, fresh_salt, is_gold, prompt, sum_of
from redis_process import RedisServer
from tier_probes import BLOCK_SIZE, ask, is_from, num_reusable, tier, wait_stored

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

CASES = (
    *("story-17", "story-32", "story-33", "story-64", "story-65", "story-128", "story-129"),
    *("story-255", "story-256", "story-257", "story-500", "text-emoji", "chat-turns", "chat-long"),
)
MAX_TOKENS = 24
POOL_BLOCKS = 62
"""Holds the longest case and its answer, and far fewer than all cases: a round of them pushes each one out."""

TIERS = {"num_blocks": POOL_BLOCKS, "host_cache_bytes": "400MiB", "store_policy": "write-through"}
"""A quarter of the host tier's slots, half of those for each tier below, takes the longest case at once."""

Ask = Callable[[str], str]
"""Asks a case, checks that the answer is GOLD and that all of its KV that may come from one source did;
returns which."""


def make_rounds(cluster: Cluster, worker: Process, ask_one: Ask) -> None:
    """Every case cold, from the pool, and from each tier, into this life of `worker` or the next."""
    for case in CASES:
        before = {name: tier(worker, name) for name in ("disk", "redis")}
        assert ask_one(case) == "cold", case
        assert ask_one(case) == "device", case
        for name, counted in before.items():
            wait_stored(worker, name, num_reusable(case) // BLOCK_SIZE, counted)
    assert_from("host", ask_one)
    worker.kill(signal.SIGKILL)
    cluster.restart(worker.name)
    assert_from("disk", ask_one)
    worker.kill(signal.SIGKILL)
    cluster.restart(worker.name, disk_cache_dir="")
    assert_from("redis", ask_one)


def assert_from(name: str, ask_one: Ask) -> None:
    """Every case is GOLD and comes from this tier, but for two at most: on a busy machine a load may take
    longer than computing, and is then given up."""
    sources = {case: ask_one(case) for case in CASES}
    assert sum(source == name for source in sources.values()) >= len(CASES) - 2, sources


@pytest.fixture
def redis_server(tmp_path: Path):
    server = RedisServer(tmp_path / "redis")
    yield server
    server.stop()


@pytest.mark.parametrize("plan", ["local", "disaggregated"])
def test_the_decode_workers_tiers(tmp_path: Path, redis_server: RedisServer, plan: str) -> None:
    """The prefill worker keeps nothing: what it held would be as near as disk and Redis are."""
    flags = TIERS | {"disk_cache_dir": tmp_path / "disk", "redis_url": redis_server.url}
    with Cluster(
        prefill=int(plan == "disaggregated"),
        prefill_flags={"enable_prefix_caching": False},
        decode_flags=flags,
    ) as cluster:
        salt = fresh_salt()
        ask_one = partial(ask_decode_worker, cluster, plan, salt)
        make_rounds(cluster, cluster.worker("decode-0"), ask_one)
        cluster.wait_idle()


def ask_decode_worker(cluster: Cluster, plan: str, salt: str, case: str) -> str:
    # A salt of its own keeps a case from hitting another's blocks: some prompts start others.
    moved = ask(cluster, f"{salt}/{case}", case, plan, MAX_TOKENS)
    sources = {
        "computed" if plan == "local" else "prefill_worker": "cold",
        **{name: name for name in ("device", "host", "disk", "redis")},
    }
    if moved == {"computed": len(prompt(case))}:
        return "cold" if plan == "local" else "computed here"
    named = [name for source, name in sources.items() if is_from(moved, source, case)]
    return named[0] if named else str(moved)


def test_the_prefill_workers_tiers(tmp_path: Path, redis_server: RedisServer) -> None:
    """The decode worker keeps nothing: it pulls every block, wherever the prefill worker has it from."""
    flags = TIERS | {"disk_cache_dir": tmp_path / "disk", "redis_url": redis_server.url}
    with Cluster(prefill_flags=flags, decode_flags={"enable_prefix_caching": False}) as cluster:
        ask_one = partial(ask_prefill_worker, cluster, fresh_salt())
        make_rounds(cluster, cluster.worker("prefill-0"), ask_one)
        cluster.wait_idle()


def ask_prefill_worker(cluster: Cluster, salt: str, case: str) -> str:
    p, d = cluster.worker("prefill-0"), cluster.worker("decode-0")
    steps, loads, pulled = p.stats()["steps"], loads_by_source(p), d.metric(PULLED, source="prefill_worker")
    reply = cluster.complete(
        prompt(case), plan="disaggregated", cache_salt=f"{salt}/{case}", max_tokens=MAX_TOKENS
    )
    assert is_gold(reply, case, MAX_TOKENS), case
    assert d.metric(PULLED, source="prefill_worker") == pulled + num_reusable(case), case
    chosen = {source for source, count in loads_by_source(p).items() if count > loads[source]}
    if p.stats()["steps"] > steps:
        return "cold"
    return "+".join(chosen) or "device"


PULLED = "baton_prompt_tokens_by_source_total"


def loads_by_source(worker: Process) -> dict[str, float]:
    metrics = worker.metrics()
    return {
        name: sum_of(metrics, "baton_kv_loads_total", sources=f"{name}+local")
        for name in ("host", "disk", "redis")
    }


@pytest.mark.parametrize("plan", ["local", "disaggregated"])
def test_after_a_swap(plan: str) -> None:
    """As many answers at once as the pool takes prompts: by the three blocks each that their answers take
    they outgrow it."""
    pool_blocks = 46
    flags = {"num_blocks": pool_blocks, "host_cache_bytes": "128MiB"}
    with Cluster(prefill=int(plan == "disaggregated"), decode_flags=flags) as cluster:
        d, preemptions = cluster.worker("decode-0"), []
        for case in ("story-31", "story-33", "story-64", "story-65", "story-129", "chat-turns"):
            before = d.metric("baton_num_preemptions_total")
            at_once = min(12, pool_blocks // -(-len(prompt(case)) // BLOCK_SIZE))
            with ThreadPoolExecutor(at_once) as pool:
                asked = [
                    pool.submit(cluster.complete, prompt(case), plan=plan, cache_salt=fresh_salt())
                    for _ in range(at_once)
                ]
            assert all(is_gold(each.result(), case) for each in asked), case
            preemptions.append(d.metric("baton_num_preemptions_total") - before)
            cluster.wait_idle()
        assert sum(map(bool, preemptions)) >= 3, preemptions  # it depends on who comes when
        assert d.metric("baton_kv_loads_total", sources="host+local") >= sum(preemptions) / 2
