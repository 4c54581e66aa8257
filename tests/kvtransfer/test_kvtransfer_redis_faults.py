"""Whatever happens to Redis or on the way there: a miss or a dropped store, in bounded time, and a counter."""

import asyncio
import socket
from contextlib import ExitStack

import pytest
from redis_process import RedisServer
from tier_blocks import BLOCK_NBYTES, Block, blocks, buffers, hashes, loaded
from tier_fixtures import MakeRedisTier, StartRedis

from kvtransfer.redis_tier import RedisTier


async def recovered(tier: RedisTier, wanted: list[Block]) -> None:
    """Ask until the tier answers again."""
    async with asyncio.timeout(20):
        while await tier.lookup(hashes(wanted)) != len(wanted):
            await asyncio.sleep(0.001)


@pytest.mark.parametrize(("policy", "full"), [("allkeys-lru", False), ("noeviction", True)])
async def test_a_server_with_10_mb(
    policy: str, full: bool, start_redis: StartRedis, make_redis_tier: MakeRedisTier
) -> None:
    server = start_redis("--maxmemory", "10mb", "--maxmemory-policy", policy)
    tier = make_redis_tier(server.url)
    brought = 0
    for seed in range(20):
        chain = blocks(30, seed)
        stored = await tier.store(chain)
        assert full or stored == 30
        brought += await loaded(tier, chain)
    assert brought > 0
    stats = tier.stats()
    assert (stats.breaker, stats.corrupt) == ("closed", 0)
    assert (stats.dropped > 0) == full
    assert (stats.errors > 0) == full


@pytest.mark.usefixtures("impatient")
async def test_stores_resume_when_there_is_memory_again(
    start_redis: StartRedis, make_redis_tier: MakeRedisTier
) -> None:
    server = start_redis("--maxmemory", "5mb", "--maxmemory-policy", "noeviction")
    tier, chain = make_redis_tier(server.url), blocks(300)
    assert 0 < await tier.store(chain) < 300
    with server.client() as client:
        client.config_set("maxmemory", "100mb")
    assert await tier.store(chain) == 300
    assert await loaded(tier, chain) == 300


@pytest.mark.usefixtures("impatient")
async def test_a_server_that_refuses_writes(
    redis_server: RedisServer, make_redis_tier: MakeRedisTier
) -> None:
    chain = blocks(3)
    await make_redis_tier(redis_server.url).store(chain)
    with redis_server.client() as client:
        client.acl_setuser(
            "reader", enabled=True, nopass=True, categories=["+@all"], commands=["-set"], keys=["*"]
        )
    tier = make_redis_tier(redis_server.url.replace("unix://", "unix://reader:x@"))
    assert await loaded(tier, chain) == 3
    assert await tier.store(blocks(3, 1)) == 0
    stats = tier.stats()
    assert (stats.dropped, stats.errors, stats.breaker) == (3, 3, "closed")


@pytest.mark.usefixtures("impatient")
async def test_a_server_that_is_absent_then_comes(
    start_redis: StartRedis, make_redis_tier: MakeRedisTier
) -> None:
    """1. Refused. 2. The breaker opens. 3. The server starts. 4. A probe closes it; blocks come back."""
    server, chain = start_redis(), blocks(4)
    server.stop()
    tier = make_redis_tier(server.url)
    assert await tier.lookup(hashes(chain)) == 0
    assert await tier.store(chain) == 0
    assert await loaded(tier, chain) == 0
    assert tier.stats().breaker != "closed"
    assert tier.stats().errors >= 1
    assert tier.stats().dropped == 4
    server.start()
    async with asyncio.timeout(20):
        while await tier.store(chain) != 4:
            await asyncio.sleep(0.001)
    assert await loaded(tier, chain) == 4
    assert tier.stats().breaker == "closed"


@pytest.mark.usefixtures("impatient")
async def test_a_server_killed_and_started_again(
    start_redis: StartRedis, make_redis_tier: MakeRedisTier
) -> None:
    server, chain = start_redis(), blocks(60)
    tier = make_redis_tier(server.url)
    assert await tier.store(chain) == 60
    server.stop()
    assert await loaded(tier, chain) == 0
    server.start()
    async with asyncio.timeout(20):
        while await tier.store(chain) != 60:
            await asyncio.sleep(0.001)
    assert await loaded(tier, chain) == 60


async def test_an_idle_connection_that_the_server_closed_is_no_fault(
    redis_server: RedisServer, make_redis_tier: MakeRedisTier
) -> None:
    tier, chain = make_redis_tier(redis_server.url), blocks(200)
    await tier.store(chain)
    assert await loaded(tier, chain) == 200
    with redis_server.client() as client:
        client.client_kill_filter(_type="normal", skipme=True)
    assert await loaded(tier, chain) == 200
    assert (tier.stats().errors, tier.stats().breaker) == (0, "closed")


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize("operation", ["lookup", "load", "store"])
async def test_a_paused_server_costs_one_deadline(
    operation: str, start_redis: StartRedis, make_redis_tier: MakeRedisTier
) -> None:
    """1. SIGSTOP. 2. One operation runs into its deadline. 3. The next ones are refused at once.
    4. SIGCONT: a probe closes the breaker, and late replies reach nobody."""
    server, chain = start_redis(), blocks(100)
    tier = make_redis_tier(server.url, stall_s=0.2)
    await tier.store(chain)
    server.pause()
    if operation == "lookup":
        assert await tier.lookup(hashes(chain)) == 0
    elif operation == "load":
        assert await loaded(tier, chain) == 0
    else:
        assert await tier.store(blocks(2, 1)) == 0
    assert tier.stats().breaker != "closed"
    assert tier.stats().errors in (1, 2)  # a load has two pipelines under way
    async with asyncio.timeout(10):  # a tenth of their deadlines
        for _ in range(500):
            assert await loaded(tier, chain) == 0
    server.resume()
    await recovered(tier, chain)
    assert await loaded(tier, chain) == 100


@pytest.mark.usefixtures("impatient")
async def test_a_lookup_given_up_by_its_caller_still_tells_the_breaker(
    start_redis: StartRedis, make_redis_tier: MakeRedisTier
) -> None:
    server, chain = start_redis(), blocks(3)
    tier = make_redis_tier(server.url, stall_s=1.0)
    await tier.store(chain)
    server.pause()
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.05):
            await tier.lookup(hashes(chain))
    assert tier.stats().breaker == "closed"
    async with asyncio.timeout(20):
        while tier.stats().breaker == "closed":
            await asyncio.sleep(0.01)
    assert tier.stats().errors == 1
    server.resume()
    await recovered(tier, chain)


async def test_a_cancelled_load_writes_nothing_more_and_blames_nobody(
    start_redis: StartRedis, make_redis_tier: MakeRedisTier
) -> None:
    server, chain = start_redis(), blocks(200)
    tier = make_redis_tier(server.url)
    await tier.store(chain)
    server.pause()
    into = buffers(200)
    load = asyncio.create_task(tier.load(hashes(chain), into))
    await asyncio.wait([load], timeout=0.05)
    load.cancel()
    await asyncio.wait([load])
    server.resume()
    assert await loaded(tier, chain) == 200
    assert all(buffer == bytes(BLOCK_NBYTES) for buffer in into)
    assert (tier.stats().errors, tier.stats().breaker) == (0, "closed")


async def test_a_black_hole_is_bounded_by_the_deadline(make_redis_tier: MakeRedisTier) -> None:
    """A listener that accepts nothing and whose queue is full: connecting hangs."""
    with ExitStack() as sockets:
        listener = sockets.enter_context(socket.create_server(("127.0.0.1", 0), backlog=0))
        for _ in range(4):
            filler = sockets.enter_context(socket.socket())
            filler.setblocking(False)
            filler.connect_ex(listener.getsockname())
        tier = make_redis_tier(f"redis://127.0.0.1:{listener.getsockname()[1]}", stall_s=0.2)
        async with asyncio.timeout(10):
            assert await tier.lookup(hashes(blocks(3))) == 0
            assert await tier.store(blocks(3)) == 0
        assert tier.stats().errors == 1
        assert tier.stats().breaker == "open"


@pytest.mark.usefixtures("impatient")
async def test_something_else_than_redis(make_redis_tier: MakeRedisTier) -> None:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(100)
        writer.write(b"HTTP/1.1 400 Bad Request\r\n\r\n")
        await writer.drain()
        writer.close()

    async with await asyncio.start_server(answer, "127.0.0.1", 0) as other:
        port = other.sockets[0].getsockname()[1]
        tier = make_redis_tier(f"redis://127.0.0.1:{port}")
        assert await tier.lookup(hashes(blocks(3))) == 0
        assert tier.stats().errors == 1
