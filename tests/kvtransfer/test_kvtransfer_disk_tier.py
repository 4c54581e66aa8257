import asyncio
import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest
from disk_directory import CAP, DIRECTORIES_NBYTES, FILE_NBYTES, du, file_of, files_in
from tier_blocks import BLOCK_NBYTES, NAMESPACE, OTHER_NAMESPACE, blocks, hashes, loaded
from tier_fixtures import MakeDiskTier

from core.errors import ConfigError
from kvtransfer import disk_files
from kvtransfer.disk_files import DIRECTORY_NBYTES, BlockFiles
from kvtransfer.disk_index import DiskIndex
from kvtransfer.disk_tier import DiskTier

HERE = Path(__file__).parent


@pytest.fixture
async def tier(make_disk_tier: MakeDiskTier) -> DiskTier:
    tier = make_disk_tier()
    assert await tier.opened()
    return tier


async def test_stored_blocks_come_back(tier: DiskTier) -> None:
    chain = blocks(10)
    assert await tier.lookup(hashes(chain)) == 0
    assert await tier.store(chain) == 10
    assert await tier.lookup(hashes(chain)) == 10
    assert await tier.lookup([*hashes(chain[:3]), b"?" * 32, *hashes(chain[3:])]) == 3
    assert await loaded(tier, chain) == 10
    stats = tier.stats()
    assert (stats.queries, stats.hits) == (31, 13)
    assert stats.load_nbytes == stats.store_nbytes == 10 * BLOCK_NBYTES
    assert stats.load_s > 0
    assert stats.store_s > 0
    assert (stats.num_blocks, stats.breaker, stats.capacity_nbytes) == (10, "closed", CAP)


async def test_a_held_block_counts_and_is_not_written_again(tier: DiskTier, tmp_path: Path) -> None:
    chain = blocks(4)
    await tier.store(chain[:2])
    before = [file_of(tmp_path / "kv", block).stat().st_ino for block in chain[:2]]
    assert await tier.store([*chain, chain[0]]) == 5
    assert [file_of(tmp_path / "kv", block).stat().st_ino for block in chain[:2]] == before
    assert tier.stats().store_nbytes == 4 * BLOCK_NBYTES


@pytest.mark.parametrize("direct", [True, False])
async def test_with_and_without_o_direct(
    direct: bool, make_disk_tier: MakeDiskTier, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(BlockFiles, "_accepts_direct", lambda self: direct)
    tier = make_disk_tier()
    assert await tier.opened()
    chain = blocks(5)
    assert await tier.store(chain) == 5
    assert await loaded(tier, chain) == 5
    assert {path.stat().st_size for path in files_in(tmp_path / "kv")} == {FILE_NBYTES}
    assert {path.stat().st_mode & 0o077 for path in [tmp_path / "kv", *files_in(tmp_path / "kv")]} == {0}


def test_a_directory_that_refuses_o_direct_is_noticed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.open

    def refuse(path: str, flags: int, *args: int) -> int:
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, "no O_DIRECT here")
        return real(path, flags, *args)

    monkeypatch.setattr(disk_files.os, "open", refuse)
    files = BlockFiles(tmp_path, NAMESPACE, BLOCK_NBYTES)
    files.open(CAP)
    assert not files.direct
    files.close()


async def test_a_restart_finds_the_files(make_disk_tier: MakeDiskTier, tmp_path: Path) -> None:
    chain = blocks(8)
    first = make_disk_tier()
    await first.opened()
    await first.store(chain)
    used = first.stats().used_nbytes
    await first.close()
    directory = tmp_path / "kv"
    os.truncate(file_of(directory, chain[6]), 5000)
    file_of(directory, chain[7]).with_suffix(".kv.tmp").write_bytes(b"half")
    (directory / "notes.txt").write_text("not ours")
    second = make_disk_tier()
    assert await second.opened()
    assert second.stats().used_nbytes == used - FILE_NBYTES
    assert await second.lookup(hashes(chain)) == 6
    assert await loaded(second, chain) == 6
    assert len(files_in(directory)) == 7
    assert (directory / "notes.txt").exists()


async def test_a_restart_keeps_the_order_of_use_and_a_smaller_cap(
    make_disk_tier: MakeDiskTier, tmp_path: Path
) -> None:
    chains = [blocks(5, seed) for seed in range(3)]
    first = make_disk_tier()
    await first.opened()
    for chain in chains:
        await first.store(chain)
    await loaded(first, chains[0])
    await first.close()
    second = make_disk_tier(cap=8 * FILE_NBYTES + DIRECTORIES_NBYTES)
    assert await second.opened()
    # the oldest chain went, then tails before heads; the one that was used last is whole
    assert await second.lookup(hashes(chains[0])) == 5
    assert await second.lookup(hashes(chains[1])) == 0
    assert await second.lookup(hashes(chains[2])) == 3
    assert second.stats().evictions == 7
    assert du(tmp_path / "kv") <= 8 * FILE_NBYTES + DIRECTORIES_NBYTES


async def test_the_cap_holds_after_every_store(make_disk_tier: MakeDiskTier, tmp_path: Path) -> None:
    cap = 20 * FILE_NBYTES
    tier = make_disk_tier(cap=cap)
    await tier.opened()
    for seed in range(12):
        assert await tier.store(blocks(4, seed)) == 4
        assert du(tmp_path / "kv") <= cap
        assert tier.stats().used_nbytes <= cap
    assert tier.stats().evictions > 0
    assert await loaded(tier, blocks(4, 11)) == 4
    assert await tier.lookup(hashes(blocks(4, 0))) == 0


async def test_other_models_files_count_and_go_first_when_older(
    make_disk_tier: MakeDiskTier, tmp_path: Path
) -> None:
    files = BlockFiles(tmp_path / "kv", OTHER_NAMESPACE, BLOCK_NBYTES)
    other = make_disk_tier(files=files)
    await other.opened()
    await other.store(blocks(5))
    await other.close()
    tier = make_disk_tier(cap=7 * FILE_NBYTES + 7 * DIRECTORY_NBYTES)
    await tier.opened()
    assert tier.stats().used_nbytes > 5 * FILE_NBYTES
    assert await tier.lookup(hashes(blocks(5))) == 0
    assert await tier.store(blocks(5)) == 5
    assert await loaded(tier, blocks(5)) == 5
    assert du(tmp_path / "kv") <= 7 * FILE_NBYTES + 7 * DIRECTORY_NBYTES


async def test_pinned_blocks_stay(make_disk_tier: MakeDiskTier) -> None:
    tier = make_disk_tier(cap=6 * FILE_NBYTES + DIRECTORIES_NBYTES)
    await tier.opened()
    kept = blocks(3)
    await tier.store(kept)
    tier.pin(hashes(kept))
    tier.pin(hashes(kept))
    tier.unpin(hashes(kept))
    for seed in range(1, 6):
        await tier.store(blocks(3, seed))
    assert await loaded(tier, kept) == 3
    tier.pin(hashes(blocks(3, 5)))
    dropped = tier.stats().dropped
    assert await tier.store(blocks(3, 9)) == 0  # all is pinned
    assert tier.stats().dropped == dropped + 3
    assert tier.stats().errors == 0
    tier.unpin(hashes(kept))
    assert await tier.store(blocks(3, 9)) == 3
    assert await tier.lookup(hashes(kept)) == 0


@pytest.mark.usefixtures("impatient")
async def test_a_directory_has_one_owner(make_disk_tier: MakeDiskTier) -> None:
    first, second = make_disk_tier(), make_disk_tier()
    assert await first.opened() != await second.opened()
    owner, other = (first, second) if first.stats().errors == 0 else (second, first)
    await owner.store(blocks(2))
    assert await other.store(blocks(2)) == 0
    assert await other.lookup(hashes(blocks(2))) == 0
    await owner.close()
    while not await other.opened():
        pass
    assert await loaded(other, blocks(2)) == 2


def store_until_killed(directory: Path) -> int:
    """Start `kv_disk_writer.py`, kill it in the midst of its work; the batches that it had stored."""
    with subprocess.Popen(
        [sys.executable, HERE / "kv_disk_writer.py", directory, str(10 * CAP)],
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": str(HERE.parent.parent)},
    ) as writer:
        assert writer.stdout is not None
        try:
            for _ in range(5):
                assert writer.stdout.readline()
        finally:
            writer.kill()
        return 5 + len(writer.stdout.readlines())


async def test_kill_9_in_the_middle_of_stores(make_disk_tier: MakeDiskTier, tmp_path: Path) -> None:
    """1. A worker stores without end. 2. kill -9. 3. The next one finds what was complete, and only that."""
    directory = tmp_path / "kv"
    stored = await asyncio.to_thread(store_until_killed, directory)
    tier = make_disk_tier(directory, 10 * CAP)
    assert await tier.opened()
    for seed in range(stored):
        assert await loaded(tier, blocks(16, seed)) == 16
    partly = blocks(16, stored)
    for block in partly:
        assert await loaded(tier, [block]) == await tier.lookup([block[0]])
    stats = tier.stats()
    assert stats.corrupt == 0
    assert du(directory) <= stats.used_nbytes + 4096
    assert not list(directory.rglob("*.tmp"))


async def test_concurrent_stores_loads_and_evictions(make_disk_tier: MakeDiskTier, tmp_path: Path) -> None:
    tier = make_disk_tier(cap=30 * FILE_NBYTES)
    await tier.opened()
    chains = [blocks(6, seed) for seed in range(10)]

    async def work(first: int) -> int:
        brought = 0
        for i in range(len(chains)):
            chain = chains[(first + i) % len(chains)]
            await tier.store(chain)
            brought += await loaded(tier, chain)
        return brought

    brought = await asyncio.gather(*(work(first) for first in (0, 3, 7)))
    assert sum(brought) > 0
    stats = tier.stats()
    assert (stats.corrupt, stats.errors) == (0, 0)
    assert du(tmp_path / "kv") <= 30 * FILE_NBYTES
    assert sum(path.stat().st_size for path in files_in(tmp_path / "kv")) == stats.num_blocks * FILE_NBYTES


def test_nothing_works_after_close_and_closing_twice_is_fine(tmp_path: Path) -> None:
    async def story() -> None:
        tier = DiskTier(BlockFiles(tmp_path, NAMESPACE, BLOCK_NBYTES), CAP, 1.0)
        await tier.close()
        await tier.close()
        assert await tier.lookup(hashes(blocks(1))) == 0
        assert await tier.store(blocks(1)) == 0
        assert await loaded(tier, blocks(1)) == 0

    asyncio.run(story())


def test_a_cap_that_holds_no_block_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="holds no block"):
        DiskTier(BlockFiles(tmp_path, NAMESPACE, BLOCK_NBYTES), FILE_NBYTES, 1.0)


def test_index_victims() -> None:
    index = DiskIndex(100)
    for name in "abcd":
        index.begin_write(20)
        index.end_write(name, 20, written=True)
    index.begin_write(20)
    assert index.used_nbytes == 100
    index.end_write("e", 20, written=False)
    assert index.victims(20) == []
    assert index.victims(21) == ["a"]
    index.touch(["a", "b"])  # a chain: its tail is older than its head
    assert index.victims(60) == ["c", "d"]
    assert index.victims(80) == ["c", "d", "b"]
    index.pin(["c"])
    assert index.victims(21) == ["d"]
    assert index.victims(81) is None
    assert index.victims(0, shortfall_nbytes=25) == ["d", "b"]
    assert index.leading(["a", "b", "x", "c"]) == 2
