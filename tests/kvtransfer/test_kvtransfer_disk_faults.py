"""Whatever happens to the directory or the disk below it: a miss or a dropped store, and a counter."""

import errno
import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from disk_directory import DIRECTORIES_NBYTES, FILE_NBYTES, Clumsy, du, file_of
from tier_blocks import BLOCK_NBYTES, NAMESPACE, OTHER_NAMESPACE, blocks, hashes, loaded
from tier_fixtures import MakeDiskTier

from kvtransfer.disk_files import BlockFiles
from kvtransfer.disk_tier import DiskTier
from kvtransfer.gate import Gate


@pytest.fixture
async def tier(make_disk_tier: MakeDiskTier) -> DiskTier:
    tier = make_disk_tier()
    assert await tier.opened()
    return tier


def truncate(path: Path, other: Path) -> None:
    os.truncate(path, FILE_NBYTES // 2)


def lengthen(path: Path, other: Path) -> None:
    os.truncate(path, FILE_NBYTES * 2)


def empty(path: Path, other: Path) -> None:
    os.truncate(path, 0)


def flip_payload(path: Path, other: Path) -> None:
    flip(path, 4096 + 777)


def flip_header(path: Path, other: Path) -> None:
    flip(path, 60)


def flip(path: Path, offset: int) -> None:
    data = bytearray(path.read_bytes())
    data[offset] ^= 1
    path.write_bytes(data)


def swap(path: Path, other: Path) -> None:
    kept = path.read_bytes()
    path.write_bytes(other.read_bytes())
    other.write_bytes(kept)


def foreign(path: Path, other: Path) -> None:
    """A file of the same hash and size that another model's worker wrote."""
    files = BlockFiles(path.parent.parent.parent, OTHER_NAMESPACE, BLOCK_NBYTES)
    block_hash = bytes.fromhex(path.stem)
    files.write(files.path(block_hash), block_hash, memoryview(bytes(BLOCK_NBYTES)), Gate(), 0)
    os.rename(files.directory / files.path(block_hash), path)


@pytest.mark.parametrize(
    ("damage", "corrupt"),
    [(truncate, 1), (lengthen, 1), (empty, 1), (flip_payload, 1), (flip_header, 1), (swap, 2), (foreign, 1)],
)
async def test_damaged_files_are_misses_and_deleted(
    damage: Callable[[Path, Path], None], corrupt: int, tier: DiskTier, tmp_path: Path
) -> None:
    chain = blocks(5)
    await tier.store(chain)
    before = tier.stats().used_nbytes
    paths = [file_of(tmp_path / "kv", block) for block in chain]
    damage(paths[2], paths[4])
    assert await loaded(tier, chain) == 2
    await loaded(tier, chain[4:])
    stats = tier.stats()
    assert stats.corrupt == corrupt
    assert not paths[2].exists()
    assert before - stats.used_nbytes == corrupt * FILE_NBYTES
    assert await tier.lookup(hashes(chain)) == 2
    assert await tier.store(chain) == 5  # heals
    assert await loaded(tier, chain) == 5


async def test_missing_files_are_misses(tier: DiskTier, tmp_path: Path) -> None:
    chain = blocks(6)
    await tier.store(chain)
    for block in chain[3:]:
        file_of(tmp_path / "kv", block).unlink()
    assert await loaded(tier, chain) == 3
    await loaded(tier, chain[4:])
    await loaded(tier, chain[5:])
    stats = tier.stats()
    assert (stats.corrupt, stats.errors, stats.num_blocks) == (0, 0, 3)
    assert await tier.store(chain) == 6


@pytest.mark.usefixtures("impatient")
async def test_a_full_disk_evicts_retries_once_then_stops_for_a_while(
    make_disk_tier: MakeDiskTier, tmp_path: Path
) -> None:
    files = Clumsy(tmp_path / "kv")
    tier = make_disk_tier(files=files)
    await tier.opened()
    await tier.store(blocks(6))
    files.failures = [errno.ENOSPC]
    assert await tier.store(blocks(1, 1)) == 1
    assert (tier.stats().evictions, tier.stats().errors) == (1, 0)
    files.failures = [errno.ENOSPC] * 2
    assert await tier.store(blocks(1, 2)) == 0
    stats = tier.stats()
    assert (stats.evictions, stats.errors, stats.dropped, stats.breaker) == (2, 1, 1, "open")
    assert await loaded(tier, blocks(1, 1)) == 1  # loads go on
    assert await tier.store(blocks(1, 2)) == 1  # the probe
    assert tier.stats().breaker == "closed"


async def test_stores_pause_after_a_failure(make_disk_tier: MakeDiskTier, tmp_path: Path) -> None:
    files = Clumsy(tmp_path / "kv")
    tier = make_disk_tier(files=files)
    await tier.opened()
    files.failures = [errno.EIO]
    assert await tier.store(blocks(9)) == 2  # the group's others were written
    assert await tier.store(blocks(3, 1)) == 0
    stats = tier.stats()
    assert (stats.errors, stats.dropped, stats.breaker) == (1, 10, "open")
    assert stats.used_nbytes == 2 * FILE_NBYTES + DIRECTORIES_NBYTES


async def test_a_file_system_near_full_is_left_its_share(
    make_disk_tier: MakeDiskTier, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tier = make_disk_tier()
    await tier.opened()
    await tier.store(blocks(6))
    monkeypatch.setattr(BlockFiles, "spare_nbytes", lambda self: FILE_NBYTES)
    assert await tier.store(blocks(3, 1)) == 3
    assert tier.stats().evictions == 2
    monkeypatch.setattr(BlockFiles, "spare_nbytes", lambda self: -(2**40))
    assert await tier.store(blocks(3, 2)) == 0
    assert tier.stats().breaker == "open"
    assert await loaded(tier, blocks(3, 1)) == 3


@pytest.mark.usefixtures("impatient")
async def test_a_probe_for_which_there_is_no_room_says_nothing(
    make_disk_tier: MakeDiskTier, tmp_path: Path
) -> None:
    files, kept = Clumsy(tmp_path / "kv"), blocks(2)
    tier = make_disk_tier(files=files, cap=3 * FILE_NBYTES + DIRECTORIES_NBYTES)
    await tier.opened()
    assert await tier.store(kept) == 2
    tier.pin(hashes(kept))
    files.failures = [errno.EIO]
    assert await tier.store(blocks(1, 1)) == 0
    assert await tier.store(blocks(2, 2)) == 0
    assert tier.stats().breaker == "open"
    tier.unpin(hashes(kept))
    assert await tier.store(blocks(2, 2)) == 2
    assert tier.stats().breaker == "closed"


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize("in_its_place", ["nothing", "a file"])
async def test_a_deleted_directory_drops_stores_until_it_is_back(
    tier: DiskTier, tmp_path: Path, in_its_place: str
) -> None:
    chain, directory = blocks(3), tmp_path / "kv"
    await tier.store(chain)
    shutil.rmtree(directory)
    if in_its_place == "a file":
        directory.touch()
    assert await loaded(tier, chain) == 0
    assert await tier.store(chain) == 0
    assert await tier.lookup(hashes(chain)) == 0
    assert not directory.is_dir()
    assert tier.stats().errors > 0
    directory.unlink(missing_ok=True)
    directory.mkdir()
    while not await tier.opened():
        pass
    assert await tier.store(chain) == 3
    assert await loaded(tier, chain) == 3
    assert tier.stats().breaker == "closed"


async def test_a_cleared_directory_goes_on(tier: DiskTier, tmp_path: Path) -> None:
    chain = blocks(3)
    await tier.store(chain)
    for entry in (tmp_path / "kv").iterdir():
        if entry.is_dir():
            shutil.rmtree(entry)
    assert await loaded(tier, chain) == 0
    assert await tier.store(chain) > 0  # what the load noticed
    assert tier.stats().errors == 0


@pytest.mark.usefixtures("impatient")
async def test_a_directory_that_cannot_be_made(make_disk_tier: MakeDiskTier, tmp_path: Path) -> None:
    (tmp_path / "kv").write_text("a file stands here")
    tier = make_disk_tier()
    assert not await tier.opened()
    assert await tier.store(blocks(3)) == 0
    assert await tier.lookup(hashes(blocks(3))) == 0
    assert await loaded(tier, blocks(3)) == 0
    assert tier.stats().errors > 0
    assert tier.stats().dropped == 3
    (tmp_path / "kv").unlink()
    while not await tier.opened():
        pass
    assert await tier.store(blocks(3)) == 3


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 20 MB."""
    mount_point = tmp_path / "small"
    mount_point.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=20m", "baton-test", str(mount_point)]
    if os.geteuid() != 0 or subprocess.run(mount, capture_output=True).returncode != 0:
        pytest.skip("mounting a tmpfs takes root")
    yield mount_point
    subprocess.run(["umount", "--lazy", str(mount_point)], check=True)


@pytest.mark.parametrize("cap", [15 * 2**20, 2**30])
async def test_a_disk_of_20_mb(cap: int, small_disk: Path, make_disk_tier: MakeDiskTier) -> None:
    """Blocks of real size, with a cap below and above what the disk has; others fill it up in the end."""
    nbytes = 720 * 1024
    files = BlockFiles(small_disk / "kv", NAMESPACE, nbytes)
    tier = make_disk_tier(files=files, cap=cap)
    await tier.opened()
    for seed in range(20):
        chain = blocks(8, seed, nbytes)
        assert await tier.store(chain) == 8
        assert du(small_disk) <= min(cap, 20 * 2**20 * 0.95)
        assert await loaded(tier, chain) == 8
    assert (tier.stats().errors, tier.stats().corrupt) == (0, 0)
    held = tier.stats().num_blocks
    others = os.open(small_disk / "others", os.O_WRONLY | os.O_CREAT)
    with suppress(OSError):
        while True:
            os.write(others, bytes(2**20))
    os.close(others)
    assert await tier.store(blocks(2, 99, nbytes)) == 2
    assert 0 < tier.stats().num_blocks < held
    assert tier.stats().breaker == "closed"
