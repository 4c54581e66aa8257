"""A disk that does not answer, and one that only has much to do."""

import asyncio
from pathlib import Path

import pytest
from disk_directory import DIRECTORIES_NBYTES, FILE_NBYTES, Clumsy, files_in
from tier_blocks import BLOCK_NBYTES, blocks, buffers, hashes, loaded
from tier_fixtures import MakeDiskTier


@pytest.mark.usefixtures("impatient")
async def test_a_hanging_disk_costs_one_stall_and_leaves_the_buffers_alone(
    make_disk_tier: MakeDiskTier, tmp_path: Path
) -> None:
    files = Clumsy(tmp_path / "kv")
    tier = make_disk_tier(files=files, stall_s=0.1)
    await tier.opened()
    chain = blocks(6)
    await tier.store(chain)
    files.free.clear()
    into = buffers(6)
    assert await tier.load(hashes(chain), into) == 0
    assert (tier.stats().errors, tier.stats().breaker) == (1, "open")
    cancelled = asyncio.create_task(tier.load(hashes(chain), into))
    await asyncio.sleep(0)
    cancelled.cancel()
    await asyncio.wait([cancelled])
    assert tier.stats().breaker == "open"
    files.free.set()
    while await loaded(tier, chain) != 6:
        pass
    assert all(buffer == bytes(BLOCK_NBYTES) for buffer in into)
    assert tier.stats().breaker == "closed"


async def test_a_busy_disk_is_not_a_hanging_one(make_disk_tier: MakeDiskTier, tmp_path: Path) -> None:
    """16 loads of 16 blocks at 10 ms each, four at a time: the last one waits longer than a stall."""
    files = Clumsy(tmp_path / "kv")
    tier = make_disk_tier(files=files, stall_s=0.3)
    await tier.opened()
    chains = [blocks(16, seed) for seed in range(4)]
    for chain in chains:
        assert await tier.store(chain) == 16
    files.read_s = 0.01
    assert await asyncio.gather(*(loaded(tier, chain) for chain in chains * 4)) == [16] * 16
    assert (tier.stats().errors, tier.stats().breaker) == (0, "closed")


async def test_a_hanging_write_keeps_its_bytes_charged_until_it_ends(
    make_disk_tier: MakeDiskTier, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvtransfer.disk_store.STALL_S", 0.05)
    files = Clumsy(tmp_path / "kv")
    tier = make_disk_tier(files=files)
    await tier.opened()
    await tier.store(blocks(2))  # the directories exist
    monkeypatch.setattr(files, "spare_nbytes", lambda: 2**40)
    files.free.clear()
    assert await tier.store(blocks(2, 1)) == 0
    assert tier.stats().used_nbytes == 4 * FILE_NBYTES + DIRECTORIES_NBYTES
    assert tier.stats().breaker == "open"
    files.free.set()
    while tier.stats().used_nbytes > 2 * FILE_NBYTES + DIRECTORIES_NBYTES:
        await asyncio.sleep(0.01)
    assert len(files_in(tmp_path / "kv")) == 2


@pytest.mark.usefixtures("impatient")
async def test_a_disk_that_hangs_while_room_is_made_is_opened_anew(
    make_disk_tier: MakeDiskTier, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvtransfer.disk_store.STALL_S", 0.05)
    files = Clumsy(tmp_path / "kv")
    tier = make_disk_tier(files=files)
    await tier.opened()
    await tier.store(blocks(2))
    files.free.clear()
    assert await tier.store(blocks(2, 1)) == 0
    assert tier.stats().errors == 1
    files.free.set()
    while not await tier.opened():
        pass
    assert await loaded(tier, blocks(2)) == 2
    assert await tier.store(blocks(2, 1)) == 2
    assert tier.stats().used_nbytes == 4 * FILE_NBYTES + DIRECTORIES_NBYTES
