"""Whatever happens to Redis and its values: GOLD, soon, a counter, and a way back."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from cluster import Cluster, Process, fresh_salt, wait_until
from redis import Redis
from redis_process import RedisServer
from tier_probes import (
    BLOCK_SIZE,
    DAMAGES,
    ask,
    breaker,
    chain,
    corrupt,
    errors,
    flipped,
    is_from,
    push_out,
    tier,
    ttft_sum,
    wait_stored,
)

from kvtransfer.payload import HEADER_NBYTES

CASE, NUM_BLOCKS = "story-65", 4
ABOVE_BLOCKS = 22
"""What pool and host tier hold at most; a quarter of the latter may be on its way down."""

DEADLINE_S = 0.5
NOISE_S = 5.0
"""By which two equal prompts may differ on a busy machine; what waits for Redis waits much longer."""


pytestmark = pytest.mark.timeout(600)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    server = RedisServer(tmp_path_factory.mktemp("redis"))
    yield server
    server.stop()


@pytest.fixture(scope="module")
def cluster(server: RedisServer) -> Iterator[Cluster]:
    with Cluster(
        prefill=0,
        num_blocks=20,
        host_cache_bytes="16MiB",
        store_policy="write-through",
        redis_url=server.url,
        tier_timeout_s=DEADLINE_S,
    ) as cluster:
        yield cluster


@pytest.fixture
def d(cluster: Cluster) -> Process:
    return cluster.ensure("decode-0")


def store(cluster: Cluster) -> str:
    """Answer the case and push it out of pool and host tier; its salt."""
    salt, url = fresh_salt(), str(cluster.worker("decode-0").flags["redis_url"])
    ask(cluster, salt, CASE)
    client = Redis.from_url(url)
    wait_until(lambda: bool(client.dbsize()) and client.exists(*keys_of(client, salt)) == NUM_BLOCKS, 20)
    push_out(cluster, ABOVE_BLOCKS)
    return salt


def keys_of(client: Redis, salt: str) -> list[str]:
    """The keys of the case's blocks in order of the chain; some block must be there already."""
    prefix, _, _ = next(client.scan_iter("baton:kv:*")).decode().rpartition(":")
    return [f"{prefix}:{h.hex()}" for h in chain(CASE, salt)]


def wait_resumed(cluster: Cluster) -> None:
    """Until the server is asked again; the breaker's back-off is some seconds at most."""
    d = cluster.worker("decode-0")

    def closed() -> bool:
        ask(cluster, fresh_salt(), CASE, max_tokens=1)
        return breaker(d, "redis") == 0

    wait_until(closed, 30, lambda: str(tier(d, "redis")))
    assert is_from(ask(cluster, store(cluster), CASE), "redis", CASE)


@contextmanager
def no_slower_than_cold(cluster: Cluster) -> Iterator[None]:
    """One request inside may take one deadline longer to its first token than one without tiers, no more."""
    began = ttft_sum(cluster)
    ask(cluster, fresh_salt(), CASE)
    cold_s = ttft_sum(cluster) - began
    began = ttft_sum(cluster)
    yield
    assert ttft_sum(cluster) - began <= cold_s + DEADLINE_S + NOISE_S


@pytest.mark.parametrize(
    ("damage", "good", "bad"),
    [pytest.param(*each, marks=[] if each[0] is flipped else pytest.mark.slow) for each in DAMAGES],
)
def test_a_damaged_value_is_a_miss(
    cluster: Cluster,
    d: Process,
    server: RedisServer,
    damage: Callable[..., list[bytes]],
    good: int,
    bad: int,
) -> None:
    """D3, D8. 1. The second value of a chain is damaged.  2. What stands before it is still used.  3. The
    damaged one is deleted, computed, and stored anew."""
    salt, client = store(cluster), server.client()
    keys = keys_of(client, salt)
    stored = client.mget(keys)
    for key, content in zip(keys, damage(*stored[:2], HEADER_NBYTES), strict=False):
        client.set(key, content)
    before, counted = corrupt(d, "redis"), tier(d, "redis")
    moved = ask(cluster, salt, CASE)
    assert moved.get("redis", 0) == good * BLOCK_SIZE
    assert moved["computed"] == 65 - good * BLOCK_SIZE
    assert corrupt(d, "redis") == before + bad
    wait_stored(d, "redis", bad, counted)
    assert [value[:80] for value in client.mget(keys)] == [value[:80] for value in stored]
    push_out(cluster, ABOVE_BLOCKS)
    assert is_from(ask(cluster, salt, CASE), "redis", CASE)


@pytest.mark.slow
def test_values_that_expired_are_misses(cluster: Cluster, d: Process, server: RedisServer) -> None:
    """D8. What is left of a chain is used; what is gone is no damage, and is stored anew."""
    salt, client = store(cluster), server.client()
    client.delete(*keys_of(client, salt)[2:])
    before, counted = corrupt(d, "redis"), tier(d, "redis")
    assert ask(cluster, salt, CASE) == {"redis": 2 * BLOCK_SIZE, "computed": 65 - 2 * BLOCK_SIZE}
    assert corrupt(d, "redis") == before
    wait_stored(d, "redis", 2, counted)


def test_the_server_dies_and_comes_back(cluster: Cluster, d: Process, server: RedisServer) -> None:
    """D2. 1. Redis is killed.  2. A prompt that it held is computed, and the breaker opens.  3. It is back,
    empty: so is the tier."""
    salt, before = store(cluster), errors(d, "redis")
    server.stop()
    try:
        with no_slower_than_cold(cluster):
            assert ask(cluster, salt, CASE) == {"computed": 65}
        assert errors(d, "redis") > before
        assert breaker(d, "redis") > 0
    finally:
        server.start()
    wait_resumed(cluster)


@pytest.mark.slow
def test_the_server_is_paused(cluster: Cluster, d: Process, server: RedisServer) -> None:
    """D2. 1. Redis stops with its connections open.  2. Prompts are answered meanwhile, only the first one
    waits for a deadline.  3. It goes on, and what it held is found."""
    first, second, before = store(cluster), store(cluster), errors(d, "redis")
    server.pause()
    try:
        with no_slower_than_cold(cluster):
            assert ask(cluster, first, CASE) == {"computed": 65}
        assert errors(d, "redis") > before
        assert breaker(d, "redis") > 0
        with no_slower_than_cold(cluster):
            assert ask(cluster, second, CASE) == {"computed": 65}
    finally:
        server.resume()
    wait_resumed(cluster)
    push_out(cluster, ABOVE_BLOCKS)
    assert is_from(ask(cluster, second, CASE), "redis", CASE)


@pytest.mark.slow
def test_the_server_is_not_there_at_start(cluster: Cluster, tmp_path: Path) -> None:
    """D2. 1. The worker begins without Redis, and serves.  2. Redis comes: the tier begins by itself."""
    server = RedisServer(tmp_path)
    server.stop()
    try:
        d = cluster.ensure("decode-0", redis_url=server.url)
        assert ask(cluster, fresh_salt(), CASE) == {"computed": 65}
        assert errors(d, "redis") > 0
        assert breaker(d, "redis") > 0
        server.start()
        wait_resumed(cluster)
    finally:
        server.stop()


@pytest.fixture
def black_hole() -> Iterator[str]:
    """The URL of a server that takes every connection and never answers."""
    taken: list[socket.socket] = []
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def accept() -> None:
            try:
                while True:
                    taken.append(listener.accept()[0])
            except OSError:
                return

        thread = threading.Thread(target=accept, daemon=True)
        thread.start()
        yield f"redis://127.0.0.1:{listener.getsockname()[1]}"
        listener.shutdown(socket.SHUT_RDWR)
    thread.join(5)
    for connection in taken:
        connection.close()


@pytest.mark.slow
def test_a_black_hole(cluster: Cluster, black_hole: str) -> None:
    """D2. The address takes connections and stays silent: the first prompt pays one deadline."""
    d = cluster.ensure("decode-0", redis_url=black_hole)
    with no_slower_than_cold(cluster):
        assert ask(cluster, fresh_salt(), CASE) == {"computed": 65}
    assert errors(d, "redis") > 0
    assert breaker(d, "redis") > 0
    assert tier(d, "redis")["hits"] == 0


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["allkeys-lru", "noeviction"])
def test_the_server_has_10_mb(cluster: Cluster, tmp_path: Path, policy: str) -> None:
    """D8. 1. Many prompts overfill it, each answer is GOLD.  2. With LRU the newest are found.  3. Without
    eviction it refuses: stores are dropped and counted, and what it holds is found all the same."""
    server = RedisServer(tmp_path, "--maxmemory", "10mb", "--maxmemory-policy", policy)
    try:
        d = cluster.ensure("decode-0", redis_url=server.url)
        oldest = store(cluster)
        for _ in range(25):
            ask(cluster, fresh_salt(), CASE, max_tokens=1)
        dropped = d.metric("baton_tier_dropped_stores_total", tier="redis")
        if policy == "noeviction":
            assert dropped > 0
            assert errors(d, "redis") > 0
            assert is_from(ask(cluster, oldest, CASE), "redis", CASE)
        else:
            assert server.client().info()["evicted_keys"] > 0
            assert errors(d, "redis") == 0
            assert ask(cluster, oldest, CASE) == {"computed": 65}
            push_out(cluster, ABOVE_BLOCKS)
            assert ask(cluster, oldest, CASE).keys() <= {"redis", "computed"}
        assert server.client().info()["used_memory"] < 12e6
    finally:
        server.stop()
