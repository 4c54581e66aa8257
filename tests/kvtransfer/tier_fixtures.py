"""Fixtures for the tests of the lower tiers; `conftest.py` hands them on."""

from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

import pytest
from disk_directory import CAP
from redis_process import RedisServer
from tier_blocks import BLOCK_NBYTES, NAMESPACE

from kvtransfer.disk_files import BlockFiles
from kvtransfer.disk_tier import DiskTier
from kvtransfer.redis_tier import RedisTier

TTL_S = 3600.0
MakeDiskTier = Callable[..., DiskTier]
MakeRedisTier = Callable[..., RedisTier]
StartRedis = Callable[..., RedisServer]


@pytest.fixture
async def make_disk_tier(tmp_path: Path) -> AsyncIterator[MakeDiskTier]:
    tiers: list[DiskTier] = []

    def make(
        directory: Path = tmp_path / "kv",
        cap: int = CAP,
        files: BlockFiles | None = None,
        stall_s: float = 5.0,
    ) -> DiskTier:
        tiers.append(DiskTier(files or BlockFiles(directory, NAMESPACE, BLOCK_NBYTES), cap, stall_s))
        return tiers[-1]

    yield make
    for tier in tiers:
        await tier.close()


@pytest.fixture(scope="module")
def shared_redis(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    """For tests that leave the server alive."""
    server = RedisServer(tmp_path_factory.mktemp("redis"))
    yield server
    server.stop()


@pytest.fixture
def redis_server(shared_redis: RedisServer) -> RedisServer:
    with shared_redis.client() as client:
        client.flushall()
    return shared_redis


@pytest.fixture
def start_redis(tmp_path: Path) -> Iterator[StartRedis]:
    servers: list[RedisServer] = []

    def start(*options: str, port: int = 0) -> RedisServer:
        servers.append(RedisServer(tmp_path / f"redis-{len(servers)}", *options, port=port))
        return servers[-1]

    yield start
    for server in servers:
        server.stop()


@pytest.fixture
async def make_redis_tier() -> AsyncIterator[MakeRedisTier]:
    tiers: list[RedisTier] = []

    def make(
        url: str, *, namespace: bytes = NAMESPACE, nbytes: int = BLOCK_NBYTES, stall_s: float = 5.0
    ) -> RedisTier:
        tiers.append(RedisTier(url, namespace, nbytes, TTL_S, stall_s))
        return tiers[-1]

    yield make
    for tier in tiers:
        await tier.close()


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Back-offs that end at once, so that every operation after a failure begins a probe."""
    monkeypatch.setattr("kvtransfer.breaker.BASE_S", 0.0)
