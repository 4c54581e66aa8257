import asyncio
import shutil
import ssl
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from redis_process import RedisServer, free_port
from tier_blocks import BLOCK_NBYTES, NAMESPACE, OTHER_NAMESPACE, Block, blocks, hashes, loaded
from tier_fixtures import TTL_S, MakeRedisTier, StartRedis

from core.errors import ConfigError
from kvtransfer.payload import HEADER_NBYTES, encode_header
from kvtransfer.redis_client import RedisClient
from kvtransfer.redis_tier import RedisTier


def key(block: Block, namespace: bytes = NAMESPACE) -> str:
    return f"baton:kv:{namespace.hex()[:16]}:{block[0].hex()}"


async def test_stored_blocks_come_back(redis_server: RedisServer, make_redis_tier: MakeRedisTier) -> None:
    tier, chain = make_redis_tier(redis_server.url), blocks(200)
    assert await tier.lookup(hashes(chain)) == 0
    assert await tier.store(chain) == 200
    assert await tier.lookup(hashes(chain)) == 200
    assert await tier.lookup([*hashes(chain[:3]), b"?" * 32, *hashes(chain[3:])]) == 3
    assert await loaded(tier, chain) == 200
    stats = tier.stats()
    assert (stats.queries, stats.hits) == (601, 203)
    assert stats.load_nbytes == stats.store_nbytes == 200 * BLOCK_NBYTES
    assert (stats.errors, stats.corrupt, stats.dropped, stats.breaker) == (0, 0, 0, "closed")


async def test_values_larger_than_a_batch(redis_server: RedisServer, make_redis_tier: MakeRedisTier) -> None:
    nbytes = 3 * 2**20
    tier, chain = make_redis_tier(redis_server.url, nbytes=nbytes), blocks(3, nbytes=nbytes)
    assert await tier.store(chain) == 3
    assert await loaded(tier, chain) == 3


async def test_a_held_block_counts_and_is_not_written_again(
    redis_server: RedisServer, make_redis_tier: MakeRedisTier
) -> None:
    tier, chain = make_redis_tier(redis_server.url), blocks(4)
    await tier.store(chain[:2])
    assert await tier.store(chain) == 4
    assert tier.stats().store_nbytes == 4 * BLOCK_NBYTES


async def test_keys_are_readable_and_a_hit_renews_their_time(
    redis_server: RedisServer, make_redis_tier: MakeRedisTier
) -> None:
    tier, chain = make_redis_tier(redis_server.url), blocks(2)
    await tier.store(chain)
    with redis_server.client(decode_responses=True) as client:
        assert sorted(client.keys("*")) == sorted(key(block) for block in chain)
        assert 0 < client.ttl(key(chain[0])) <= TTL_S
        client.expire(key(chain[0]), 5)
        await loaded(tier, chain)
        assert client.ttl(key(chain[0])) > 5


async def test_another_model_finds_nothing(redis_server: RedisServer, make_redis_tier: MakeRedisTier) -> None:
    chain = blocks(3)
    await make_redis_tier(redis_server.url).store(chain)
    other = make_redis_tier(redis_server.url, namespace=OTHER_NAMESPACE)
    assert await other.lookup(hashes(chain)) == 0
    assert await loaded(other, chain) == 0


def value(block: Block, namespace: bytes = NAMESPACE) -> bytes:
    return encode_header(namespace, *block) + bytes(block[1])


def flipped(data: bytes, offset: int) -> bytes:
    changed = bytearray(data)
    changed[offset] ^= 1
    return bytes(changed)


DAMAGES: dict[str, Callable[[Block, Block], bytes]] = {
    "flipped payload": lambda block, other: flipped(value(block), HEADER_NBYTES + 99),
    "flipped header": lambda block, other: flipped(value(block), 50),
    "swapped": lambda block, other: value(other),
    "foreign": lambda block, other: value(block, OTHER_NAMESPACE),
    "no block at all": lambda block, other: bytes(HEADER_NBYTES + BLOCK_NBYTES),
    "truncated": lambda block, other: value(block)[:-1],
    "longer": lambda block, other: value(block) + b"x",
    "header only": lambda block, other: value(block)[:HEADER_NBYTES],
    "short": lambda block, other: b"hello",
}


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
async def test_damaged_values_are_misses_and_deleted(
    damage: Callable[[Block, Block], bytes], redis_server: RedisServer, make_redis_tier: MakeRedisTier
) -> None:
    tier, chain = make_redis_tier(redis_server.url), blocks(5)
    await tier.store(chain)
    with redis_server.client() as client:
        client.set(key(chain[2]), damage(chain[2], chain[4]))
        assert await loaded(tier, chain) == 2
        assert not client.exists(key(chain[2]))
    assert tier.stats().corrupt == 1
    assert tier.stats().breaker == "closed"
    assert await tier.store(chain) == 5
    assert await loaded(tier, chain) == 5


@pytest.mark.parametrize("operation", ["lookup", "load", "store"])
async def test_a_value_of_another_type_is_replaced(
    operation: str, redis_server: RedisServer, make_redis_tier: MakeRedisTier
) -> None:
    tier, chain = make_redis_tier(redis_server.url), blocks(3)
    with redis_server.client() as client:
        client.rpush(key(chain[1]), "a list")
        if operation == "lookup":
            assert await tier.lookup(hashes(chain)) == 0
        elif operation == "load":
            assert await loaded(tier, chain) == 0
        assert await tier.store(chain) == 3
    assert tier.stats().corrupt == 1
    assert await loaded(tier, chain) == 3


async def test_a_value_evicted_between_lookup_and_load(
    redis_server: RedisServer, make_redis_tier: MakeRedisTier
) -> None:
    tier, chain = make_redis_tier(redis_server.url), blocks(4)
    await tier.store(chain)
    assert await tier.lookup(hashes(chain)) == 4
    with redis_server.client() as client:
        client.delete(key(chain[1]))
    assert await loaded(tier, chain) == 1
    assert tier.stats().corrupt == 0


async def test_a_burst_is_no_fault(redis_server: RedisServer, make_redis_tier: MakeRedisTier) -> None:
    """300 look-ups, 20 loads and a store at once: all are answered, over a handful of connections."""
    tier, chain = make_redis_tier(redis_server.url), blocks(20)
    assert await tier.store(chain) == 20
    with redis_server.client() as client:
        before = client.info("stats")["total_connections_received"]
        *answers, stored = await asyncio.gather(
            *(tier.lookup(hashes(chain)) for _ in range(300)),
            *(loaded(tier, chain) for _ in range(20)),
            tier.store(blocks(20, 1)),
        )
        opened = client.info("stats")["total_connections_received"] - before
    assert answers == [20] * 320
    assert stored == 20
    assert opened <= 16
    assert (tier.stats().errors, tier.stats().breaker) == (0, "closed")


async def test_passwords(start_redis: StartRedis, make_redis_tier: MakeRedisTier) -> None:
    server, chain = start_redis("--requirepass", "secret"), blocks(3)
    right = make_redis_tier(server.url.replace("unix://", "unix://:secret@"))
    assert await right.store(chain) == 3
    assert await loaded(right, chain) == 3
    for url in (server.url, server.url.replace("unix://", "unix://:wrong@")):
        tier = make_redis_tier(url)
        assert await tier.lookup(hashes(chain)) == 0
        assert tier.stats().breaker == "open"


@pytest.fixture
def certificate(tmp_path: Path) -> Path:
    """Key and self-signed certificate of 127.0.0.1 in one file."""
    if shutil.which("openssl") is None:
        pytest.skip("openssl makes the certificate")
    path = tmp_path / "cert.pem"
    make = "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 2 -subj /CN=localhost"
    name = ["-addext", "subjectAltName=IP:127.0.0.1"]
    subprocess.run([*make.split(), *name, "-keyout", path, "-out", path], check=True, capture_output=True)
    return path


async def test_tls(redis_server: RedisServer, make_redis_tier: MakeRedisTier, certificate: Path) -> None:
    """Through a proxy that ends TLS: the server in the wheel cannot do it."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate)

    async def pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(2**16):
            writer.write(data)
            await writer.drain()
        writer.close()

    async def terminate(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        inner_reader, inner_writer = await asyncio.open_unix_connection(redis_server.socket)
        await asyncio.gather(pump(reader, inner_writer), pump(inner_reader, writer), return_exceptions=True)

    async with await asyncio.start_server(terminate, "127.0.0.1", 0, ssl=context) as proxy:
        port = proxy.sockets[0].getsockname()[1]
        chain = blocks(100)
        tier = make_redis_tier(f"rediss://127.0.0.1:{port}?ssl_ca_certs={certificate}")
        assert await tier.store(chain) == 100
        assert await loaded(tier, chain) == 100
        await tier.close()
        distrustful = make_redis_tier(f"rediss://127.0.0.1:{port}")
        assert await distrustful.lookup(hashes(chain)) == 0
        assert distrustful.stats().breaker == "open"


async def test_a_cluster(start_redis: StartRedis, make_redis_tier: MakeRedisTier) -> None:
    """Two nodes, half of the slots each; then one of them dies."""
    nodes = [start_redis("--cluster-enabled", "yes", port=free_port()) for _ in range(2)]
    ports = [int(node.url.rsplit(":", 1)[1]) for node in nodes]
    for i, node in enumerate(nodes):
        with node.client() as client:
            client.execute_command("CLUSTER ADDSLOTS", *range(i * 8192, (i + 1) * 8192))
            client.execute_command("CLUSTER MEET", "127.0.0.1", ports[1 - i])
    async with asyncio.timeout(20):
        for node in nodes:
            with node.client() as client:
                while client.execute_command("CLUSTER INFO")["cluster_state"] != "ok":
                    await asyncio.sleep(0.01)
    tier, chain = make_redis_tier(f"redis+cluster://127.0.0.1:{ports[0]}", stall_s=2.0), blocks(100)
    assert await tier.store(chain) == 100
    assert await tier.lookup(hashes(chain)) == 100
    assert await loaded(tier, chain) == 100
    for node in nodes:
        with node.client() as client:
            assert client.dbsize() > 20
    nodes[1].stop()
    assert await loaded(tier, chain) < 100
    assert tier.stats().breaker == "open"


@pytest.mark.parametrize(
    ("url", "says"),
    [
        ("http://host:6379", "begins with none of redis://"),
        ("localhost:6379", "rediss://"),
        ("redis://host:notaport", "cannot be used"),
        ("redis://host:6379?ssl_ca_certs", None),
        ("redis://host:6379?max_connections=4", "leave it out or write 16 or more"),
        ("redis+cluster://host:6379?max_connections=4", "leave it out or write 16 or more"),
    ],
)
def test_urls_that_cannot_work_are_refused(url: str, says: str | None) -> None:
    if says is None:
        assert RedisClient(url).address == "redis://host:6379"
        return
    with pytest.raises(ConfigError, match=says):
        RedisClient(url)


@pytest.mark.parametrize(
    ("url", "address"),
    [
        ("redis://:secret@host:6380/2?client_name=me", "redis://host:6380"),
        ("rediss://me:secret@host", "rediss://host"),
        ("redis+cluster://:secret@host:7000", "redis+cluster://host:7000"),
        ("unix://:secret@/run/redis.sock?db=1", "unix:///run/redis.sock"),
    ],
)
def test_the_log_knows_no_password(url: str, address: str) -> None:
    assert RedisClient(url).address == address


@pytest.mark.parametrize("url", ["redis://me:qq/zz@host:6379", "me:qq/zz@host:6379", "redis://:qq/zz@host"])
def test_a_refusal_knows_no_password(url: str) -> None:
    """It is not percent-encoded, so its first part reads as a port; or the scheme is missing."""
    with pytest.raises(ConfigError) as refused:
        RedisClient(url)
    assert "qq" not in str(refused.value)
    assert "zz" not in str(refused.value)


async def test_nothing_works_after_close_and_closing_twice_is_fine(redis_server: RedisServer) -> None:
    tier = RedisTier(redis_server.url, NAMESPACE, BLOCK_NBYTES, TTL_S, 1.0)
    assert await tier.store(blocks(1)) == 1
    await tier.close()
    await tier.close()
    assert await tier.lookup(hashes(blocks(1))) == 0
    assert await loaded(tier, blocks(1)) == 0
    assert await tier.store(blocks(1, 1)) == 0
