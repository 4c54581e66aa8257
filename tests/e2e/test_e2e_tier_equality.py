"""GOLD's tokens from every tier, on the decode worker and on the prefill worker, and after a swap."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pytest
from cluster import GOLD, Cluster, Process, fresh_salt, is_gold, prompt, sum_of
from redis_process import RedisServer
from tier_probes import BLOCK_SIZE, ask, is_all_from, num_reusable, tier, wait_stored

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

CASES = [case for case in GOLD if num_reusable(case)]
MAX_TOKENS = 8
POOL_BLOCKS = 260
"""Holds the longest case and its answer, and so few blocks that all other cases push each one out."""

TRIES = 3
"""For a case to come whole from a tier: on a busy machine a load may take longer than computing, and is then
given up. The answer is GOLD in every try."""

TIERS = {"num_blocks": POOL_BLOCKS, "host_cache_bytes": "480MiB", "store_policy": "write-through"}
"""Room in host RAM for all cases; an eighth of it takes what one step computes on its way to each tier below."""

Ask = Callable[[str], str]
"""Asks a case, checks that the answer is GOLD, and returns which source all of its KV came from that may come
from one."""


@dataclass(frozen=True)
class Stored:
    """Every case with a salt of its own, since some prompts start others, on disk and in Redis."""

    directory: Path
    redis_url: str
    salt: str

    def salt_of(self, case: str) -> str:
        return f"{self.salt}/{case}"

    @property
    def flags(self) -> dict[str, object]:
        return TIERS | {"disk_cache_dir": self.directory, "redis_url": self.redis_url}


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stored]:
    """A first life computes all of them."""
    folder = tmp_path_factory.mktemp("kv")
    server = RedisServer(folder / "redis")
    stored = Stored(folder / "disk", server.url, fresh_salt())
    try:
        with Cluster(prefill=0, decode_flags=stored.flags) as cluster:
            d = cluster.worker("decode-0")
            for case in CASES:
                before = {name: tier(d, name) for name in ("disk", "redis")}
                cold = ask(cluster, stored.salt_of(case), case, max_tokens=MAX_TOKENS)
                assert cold == {"computed": len(prompt(case))}, case
                for name, counted in before.items():
                    wait_stored(d, name, num_reusable(case) // BLOCK_SIZE, counted)
        yield stored
    finally:
        server.stop()


def make_rounds(cluster: Cluster, worker: Process, ask_one: Ask) -> None:
    """Every case from disk, from the pool and from host RAM in lives of `worker` that know none of them, and
    from Redis in one without a disk."""

    def next_life(directory: object) -> None:
        worker.kill(signal.SIGKILL)
        cluster.restart(worker.name, disk_cache_dir=directory)

    found_in("disk", ask_one, partial(next_life, worker.first_flags["disk_cache_dir"]))
    for case in CASES:
        ask_one(case)
        assert ask_one(case) == "device", case
    found_in("host", ask_one, lambda: None)
    found_in("redis", ask_one, partial(next_life, ""))


def found_in(name: str, ask_one: Ask, begin: Callable[[], None]) -> None:
    """Every case comes whole from this tier, each in one try at least; what does not come is computed, and
    then nearer than it was."""
    left = set(CASES)
    for _ in range(TRIES):
        begin()
        sources = {case: ask_one(case) for case in CASES}
        left -= {case for case, source in sources.items() if source == name}
        if not left:
            return
    raise AssertionError(f"not from {name}: {sorted(left)}; the last try: {sources}")


@pytest.mark.parametrize("plan", ["local", "disaggregated"])
def test_the_decode_workers_tiers(stored: Stored, plan: str) -> None:
    """The prefill worker keeps nothing: what it held would be as near as disk and Redis are."""
    with Cluster(
        prefill=int(plan == "disaggregated"),
        prefill_flags={"enable_prefix_caching": False},
        decode_flags=stored.flags,
    ) as cluster:
        make_rounds(cluster, cluster.worker("decode-0"), partial(ask_decode_worker, cluster, stored, plan))
        cluster.wait_idle()


def ask_decode_worker(cluster: Cluster, stored: Stored, plan: str, case: str) -> str:
    moved = ask(cluster, stored.salt_of(case), case, plan, MAX_TOKENS)
    whole = (name for name in ("device", "host", "disk", "redis") if is_all_from(moved, name, case))
    return next(whole, str(moved))


def test_the_prefill_workers_tiers(stored: Stored) -> None:
    """The decode worker keeps nothing: it pulls every block, wherever the prefill worker has it from."""
    with Cluster(prefill_flags=stored.flags, decode_flags={"enable_prefix_caching": False}) as cluster:
        make_rounds(cluster, cluster.worker("prefill-0"), partial(ask_prefill_worker, cluster, stored))
        cluster.wait_idle()


def ask_prefill_worker(cluster: Cluster, stored: Stored, case: str) -> str:
    p, d = cluster.worker("prefill-0"), cluster.worker("decode-0")
    steps, loads, pulled = p.stats()["steps"], loads_by_source(p), d.metric(PULLED, source="prefill_worker")
    salt = stored.salt_of(case)
    reply = cluster.complete(prompt(case), plan="disaggregated", cache_salt=salt, max_tokens=MAX_TOKENS)
    assert is_gold(reply, case, MAX_TOKENS), case
    assert d.metric(PULLED, source="prefill_worker") == pulled + num_reusable(case), case
    chosen = {source for source, count in loads_by_source(p).items() if count > loads[source]}
    if p.stats()["steps"] > steps:
        return "computed, at least in part"
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
