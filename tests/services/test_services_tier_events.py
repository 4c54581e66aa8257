"""What a worker reports of its tiers is what they hold: replayed, the events give their content exactly."""

from __future__ import annotations

import asyncio
import os
import random
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, suppress
from functools import partial
from pathlib import Path

import pytest
from host_slots import put
from redis_process import RedisServer

from core.blocks import block_key
from core.clock import FakeClock
from kvtransfer.disk_files import BlockFiles
from kvtransfer.disk_tier import DiskTier
from kvtransfer.gate import Gate
from kvtransfer.host_tier import HostTier
from kvtransfer.redis_index import RedisIndex
from kvtransfer.redis_tier import RedisTier
from kvtransfer.region import Region
from kvtransfer.store_policy import StorePolicy
from kvtransfer.tier_pool import RegionPool
from kvtransfer.tier_stack import TierStack
from planning.prefix_index import TIERS, Changes, PrefixIndex
from services.worker.kv_events import KVEventLog
from services.worker.watch import tier_states

NBYTES = 8192
NAMESPACE, OTHER_NAMESPACE = bytes([1]) * 32, bytes([2]) * 32
FILE_NBYTES = NBYTES + 4096
LOADED = 128
"""Blocks of the pool from here on are loaded into."""
POOL = Region.create(LOADED + 8, NBYTES, "tests")


def name(i: int) -> bytes:
    """Hash number i; they lie in one directory of the disk tier."""
    return b"\0" + i.to_bytes(31, "little")


def payload(i: int) -> memoryview:
    return memoryview(i.to_bytes(8, "little") * (NBYTES // 8))


def commit(stack: TierStack, i: int) -> bool:
    """The engine commits block i of the pool; whether the host tier holds it then."""
    POOL.block(i)[:] = payload(i)
    stack.committed([name(i)], [i])
    return stack.host.holds(name(i))


def buffers(count: int) -> list[memoryview]:
    return [memoryview(bytearray(NBYTES)) for _ in range(count)]


class Watcher:
    """A router that follows a worker's events, as often as it is told to look."""

    def __init__(self, log: KVEventLog) -> None:
        self._log, self._cursor, self._index = log, None, PrefixIndex()

    def look(self) -> None:
        events, self._cursor = self._log.since(self._cursor)
        if events is not None:
            changes = [Changes(t.tier, t.stored, t.evicted) for t in events.tiers]
            assert self._index.apply("w", events.first, events.next, events.snapshot, changes)

    def held(self, tier: str) -> set[int]:
        """Keys of the blocks that it believes to be in this tier."""
        self.look()
        bit, known = 1 << TIERS.index(tier), self._index._workers["w"].tiers
        return {key for key, tiers in known.items() if tiers & bit}


def keys(ids: set[int]) -> set[int]:
    return {block_key(name(i)) for i in ids}


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(10):
        while not condition():
            await asyncio.sleep(0.005)


@asynccontextmanager
async def stack_on(
    folder: Path, log: KVEventLog, slots: int = 24, files: int = 40
) -> AsyncIterator[TierStack]:
    """Host and disk; the cap on disk holds `files` blocks."""
    disk = DiskTier(
        BlockFiles(folder, NAMESPACE, NBYTES),
        files * FILE_NBYTES + 4 * 4096,
        5.0,
        partial(log.report, "disk"),
    )
    stack = TierStack(
        RegionPool(POOL),
        slots * NBYTES,
        [disk],
        StorePolicy.WRITE_THROUGH,
        on_host_change=partial(log.report, "host"),
    )
    try:
        await until(lambda: stack.stats()["disk"].used_nbytes > 0)  # nobody asked, and it is open
        yield stack
    finally:
        await stack.close()


def on_disk(folder: Path, namespace: bytes = NAMESPACE) -> set[int]:
    files = (folder / namespace[:8].hex()).rglob("*.kv")
    return {block_key(bytes.fromhex(file.stem)) for file in files}


def harm(folder: Path, rng: random.Random, turn: int) -> None:
    """Now and then delete a file, or cut one short."""
    files = sorted(folder.rglob("*.kv"))
    if files and turn % 5 == 0:
        rng.choice(files).unlink(missing_ok=True)
    elif files and turn % 5 == 1:
        with suppress(FileNotFoundError):  # evicted meanwhile
            os.truncate(rng.choice(files), 100)


async def test_random_traffic_over_host_and_disk_is_reported_exactly(tmp_path: Path) -> None:
    """Commits on the engine's thread, loads on ours, evictions, deleted and damaged files."""
    log, rng = KVEventLog(limit=200), random.Random(3)
    eager, lazy = Watcher(log), Watcher(log)
    async with stack_on(tmp_path, log, files=15) as stack:
        stopped = threading.Event()

        def engine() -> None:
            own = random.Random(4)
            while not stopped.is_set():
                i = own.randrange(80)
                commit(stack, i)
                if own.random() < 0.2:
                    stack.host.evict(name(own.randrange(80)))
                stopped.wait(0.0005)

        thread = threading.Thread(target=engine)
        thread.start()
        for turn in range(150):
            first = rng.randrange(76)
            wanted = [name(i) for i in range(first, first + 4)]
            await stack.load(rng.choice(["host", "disk"]), wanted, range(LOADED, LOADED + 4), lambda _: None)
            harm(tmp_path, rng, turn)
            if rng.random() < 0.5:
                eager.look()
            if turn == 70:
                lazy.look()
        stopped.set()
        await asyncio.to_thread(thread.join, 10)
        for turn in (1, 1, 1):
            harm(tmp_path, rng, turn)
        for i in range(80):  # whose file was deleted or damaged is found out by asking for it
            await until(lambda i=i: stack.host.evict(name(i)) or not stack.host.holds(name(i)))
            await stack.load("disk", [name(i)], range(LOADED, LOADED + 1), lambda _: None)
        await stack.close()
        in_host = {i for i in range(80) if stack.host.holds(name(i))}
        assert in_host
        assert eager.held("host") == lazy.held("host") == keys(in_host)
        assert eager.held("disk") == lazy.held("disk") == on_disk(tmp_path)
        assert on_disk(tmp_path)
        assert stack.stats()["disk"].corrupt > 0
        assert stack.stats()["disk"].evictions > 0


async def test_a_restarted_worker_tells_of_its_disk_before_anyone_asks(tmp_path: Path) -> None:
    async with stack_on(tmp_path, KVEventLog()) as stack:
        for i in range(6):
            commit(stack, i)
        await until(lambda: stack.stats()["disk"].num_blocks == 6)
    other = BlockFiles(tmp_path, OTHER_NAMESPACE, NBYTES)
    foreign = tmp_path / other.path(name(9))
    foreign.parent.mkdir(parents=True)
    foreign.write_bytes(bytes(FILE_NBYTES))
    (tmp_path / BlockFiles(tmp_path, NAMESPACE, NBYTES).path(name(3))).write_bytes(b"short")
    log = KVEventLog()
    watcher = Watcher(log)
    async with stack_on(tmp_path, log) as stack:
        await until(lambda: log.num_held("disk") > 0)
        assert watcher.held("disk") == keys({0, 1, 2, 4, 5}), "ours, whole"
        assert watcher.held("host") == set()
        assert (
            await stack.load("disk", [name(i) for i in range(3)], range(LOADED, LOADED + 3), lambda _: None)
            == 3
        )
        assert watcher.held("host") == keys({0, 1, 2})


class SlowReads(BlockFiles):
    def __init__(self, folder: Path) -> None:
        super().__init__(folder, NAMESPACE, NBYTES)
        self.reading, self.go_on = threading.Event(), threading.Event()

    def read(self, path: str, block_hash: bytes, into: memoryview, gate: Gate) -> str | None:
        self.reading.set()
        self.go_on.wait(10)
        return super().read(path, block_hash, into, gate)


async def test_what_is_being_read_from_disk_is_not_evicted_meanwhile(tmp_path: Path) -> None:
    """Else it could be stored again before the read ends as missing, and that would strike it out."""
    log, files = KVEventLog(), SlowReads(tmp_path)
    tier = DiskTier(files, 3 * FILE_NBYTES + 4 * 4096, 5.0, partial(log.report, "disk"))
    await tier.opened()
    await tier.store([(name(i), payload(i)) for i in range(3)])
    load = asyncio.create_task(tier.load([name(2)], buffers(1)))  # the tail, which would go first
    await asyncio.to_thread(files.reading.wait, 10)
    assert await tier.store([(name(3), payload(3))]) == 1
    files.go_on.set()
    assert await load == 1
    assert Watcher(log).held("disk") == on_disk(tmp_path) == keys({0, 2, 3})
    await tier.close()


async def test_a_worker_without_a_host_tier_tells_of_none() -> None:
    """What lies in the staging slots on its way up or down is not looked up there."""
    log = KVEventLog()
    stack = TierStack(RegionPool(POOL), 0, [], on_host_change=partial(log.report, "host"))
    assert commit(stack, 0)
    assert await stack.lookup([name(0)]) == []
    assert log.num_held("host") == 0
    await stack.close()


async def test_routers_are_told_how_fast_and_full_each_tier_is(tmp_path: Path) -> None:
    async with stack_on(tmp_path, KVEventLog()) as stack:
        for i in range(6):
            commit(stack, i)
        await until(lambda: stack.stats()["disk"].num_blocks == 6)
        assert len(await stack.lookup([name(i) for i in range(8)])) == 1
        host, disk = tier_states(stack, block_size=16)
    assert (host.tier, host.blocks, host.used_bytes, host.hit_blocks) == ("host", 6, 6 * NBYTES, 6)
    assert host.capacity_bytes == 24 * NBYTES
    assert host.breaker == ""
    assert (disk.tier, disk.blocks, disk.hit_blocks, disk.breaker) == ("disk", 6, 0, "closed")
    assert 6 * FILE_NBYTES < disk.used_bytes < disk.capacity_bytes
    for state in (host, disk):
        assert state.token_s == pytest.approx(NBYTES / 16 / stack.rate(state.tier).nbytes_per_s)


async def test_a_directory_that_is_gone_holds_nothing_until_it_is_back(tmp_path: Path) -> None:
    folder, log = tmp_path / "kv", KVEventLog()
    watcher = Watcher(log)
    async with stack_on(folder, log) as stack:
        commit(stack, 0)
        await until(lambda: log.num_held("disk") == 1)
        folder.rename(tmp_path / "elsewhere")
        commit(stack, 1)
        await until(lambda: stack.stats()["disk"].dropped > 0)
        await stack.lookup([name(5)])
        assert watcher.held("disk") == set()
        (tmp_path / "elsewhere").rename(folder)
        async with asyncio.timeout(10):
            while not log.num_held("disk"):  # the tier tries again when it is asked, after a back-off
                await stack.lookup([name(5)])
                await asyncio.sleep(0.01)
        assert watcher.held("disk") == keys({0})


def test_the_last_event_of_a_block_is_its_state_whoever_wins_the_race() -> None:
    """Threads that store and evict the same few blocks in an arena too small for them."""
    log = KVEventLog()
    host = HostTier(3 * NBYTES, NBYTES, partial(log.report, "host"))

    def churn(seed: int) -> None:
        own = random.Random(seed)
        for _ in range(1500):
            i = own.randrange(6)
            put(host, name(i), payload(i)) if own.random() < 0.6 else host.evict(name(i))

    threads = [threading.Thread(target=churn, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    host.check()
    assert Watcher(log).held("host") == keys({i for i in range(6) if host.holds(name(i))})
    assert host.stats().evictions > 100


# Redis evicts without a word: what is reported is a belief.


@pytest.fixture
def server(tmp_path: Path) -> Iterator[RedisServer]:
    server = RedisServer(tmp_path / "redis")
    yield server
    server.stop()


async def test_what_redis_is_believed_to_hold(server: RedisServer) -> None:
    """1. We store.  2. Another worker finds.  3. Redis evicts: known once asked for.  4. It is lost."""
    log, other_log = KVEventLog(), KVEventLog()
    watcher, other = Watcher(log), Watcher(other_log)
    tier = RedisTier(server.url, NAMESPACE, NBYTES, 60.0, 2.0, partial(log.report, "redis"))
    second = RedisTier(server.url, NAMESPACE, NBYTES, 60.0, 2.0, partial(other_log.report, "redis"))
    names = [name(i) for i in range(6)]
    assert await tier.store([(name(i), payload(i)) for i in range(6)]) == 6
    assert watcher.held("redis") == keys({0, 1, 2, 3, 4, 5})
    assert other.held("redis") == set()
    assert await second.lookup(names[:4]) == 4
    assert other.held("redis") == keys({0, 1, 2, 3})
    with server.client() as client:
        for key in client.scan_iter():
            if name(2).hex() in key.decode():
                client.delete(key)
            elif name(4).hex() in key.decode():
                client.setrange(key, 300, b"damage")
    assert await tier.load(names, buffers(6)) == 2
    assert watcher.held("redis") == keys({0, 1, 3, 5}), "missing and damaged"
    assert await second.lookup(names) == 2
    assert other.held("redis") == keys({0, 1, 3, 5})
    server.stop()
    assert await tier.lookup(names) == 0
    assert watcher.held("redis") == set()
    for each in (tier, second):
        await each.close()


def test_a_belief_ends_with_its_time_and_has_a_limit() -> None:
    clock, believed = FakeClock(), set[bytes]()

    def on_change(stored, evicted):
        assert not believed & set(stored)
        assert believed >= set(evicted)
        believed.difference_update(evicted)
        believed.update(stored)

    index = RedisIndex(10.0, on_change, limit=4, clock=clock)
    index.seen([name(0), name(1)], renewed=True)
    clock.advance(6)
    index.seen([name(0), name(2)], renewed=False)  # a look-up does not renew
    index.seen([name(1)], renewed=True)  # a load does
    clock.advance(5)
    index.missed([])
    assert believed == {name(1), name(2)}
    index.seen([name(i) for i in range(3, 6)], renewed=True)
    assert len(index) == 4
    assert believed == {name(1), name(3), name(4), name(5)}
    index.clear()
    assert believed == set()
    assert len(index) == 0
