"""Whatever happens to the files and the directory of the disk tier: GOLD, a counter, and a way back."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from cluster import Cluster, Process, fresh_salt, prompt, wait_until
from tier_probes import (
    BLOCK_NBYTES,
    BLOCK_SIZE,
    DAMAGES,
    ask,
    block_files,
    breaker,
    chain,
    corrupt,
    disk_usage,
    errors,
    flipped,
    is_from,
    push_out,
    tier,
    wait_stored,
)

from kvtransfer.disk_files import DIRECTORY_NBYTES
from kvtransfer.disk_walk import ALIGNMENT

CASE, NUM_BLOCKS = "story-65", 4
ABOVE_BLOCKS = 22
"""What pool and host tier hold at most; a quarter of the latter may be on its way down."""

FILE_NBYTES = ALIGNMENT + BLOCK_NBYTES


pytestmark = pytest.mark.timeout(600)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with Cluster(
        prefill=0,
        num_blocks=20,
        host_cache_bytes="16MiB",
        store_policy="write-through",
        disk_cache_dir=tmp_path_factory.mktemp("kv") / "blocks",
        disk_cache_bytes="400MiB",
    ) as cluster:
        yield cluster


@pytest.fixture
def d(cluster: Cluster) -> Process:
    """The worker with the fixture's flags and a directory that it can use."""
    d = cluster.ensure("decode-0")
    directory_of(d).mkdir(exist_ok=True)
    return d


def directory_of(d: Process) -> Path:
    return Path(str(d.flags["disk_cache_dir"]))


def store(cluster: Cluster) -> tuple[str, list[Path]]:
    """Answer the case and push it out of pool and host tier; its salt and its files in order of the chain."""
    directory, salt = directory_of(cluster.worker("decode-0")), fresh_salt()
    ask(cluster, salt, CASE)
    wait_until(
        lambda: bool(block_files(directory)) and all(f.exists() for f in files_of(directory, CASE, salt)), 20
    )
    push_out(cluster, ABOVE_BLOCKS)
    return salt, files_of(directory, CASE, salt)


def files_of(directory: Path, case: str, salt: str) -> list[Path]:
    """Where the blocks of a case would be; some block must be there already."""
    any_file = next(iter(block_files(directory)))
    hashes = chain(case, salt)
    return [any_file.parents[1] / h.hex()[:2] / f"{h.hex()}.kv" for h in hashes]


def wait_resumed(cluster: Cluster) -> None:
    """Until new blocks are stored again; the breaker's back-off is some seconds at most."""
    d = cluster.worker("decode-0")
    before = tier(d, "disk")["store_nbytes"]

    def stored() -> bool:
        ask(cluster, fresh_salt(), CASE, max_tokens=1)
        return tier(d, "disk")["store_nbytes"] > before

    wait_until(stored, 30, lambda: str(tier(d, "disk")))
    assert breaker(d, "disk") == 0


@pytest.mark.parametrize(
    ("damage", "good", "bad"),
    [pytest.param(*each, marks=[] if each[0] is flipped else pytest.mark.slow) for each in DAMAGES],
)
def test_a_damaged_file_is_a_miss(
    cluster: Cluster, d: Process, damage: Callable[..., list[bytes]], good: int, bad: int
) -> None:
    """D3. 1. The second file of a chain is damaged.  2. What stands before it is still used.  3. The damaged
    one is deleted, computed, and stored anew."""
    salt, files = store(cluster)
    stored = [file.read_bytes() for file in files]
    for file, content in zip(files, damage(*stored[:2], ALIGNMENT), strict=False):
        file.write_bytes(content)
    before, counted = corrupt(d, "disk"), tier(d, "disk")
    moved = ask(cluster, salt, CASE)
    assert moved.get("disk", 0) == good * BLOCK_SIZE
    assert moved["computed"] == 65 - good * BLOCK_SIZE
    assert corrupt(d, "disk") == before + bad
    wait_stored(d, "disk", bad, counted)
    assert [file.read_bytes()[:ALIGNMENT] for file in files] == [content[:ALIGNMENT] for content in stored]
    push_out(cluster, ABOVE_BLOCKS)
    assert is_from(ask(cluster, salt, CASE), "disk", CASE)


@pytest.mark.slow
def test_files_deleted_by_others_are_misses(cluster: Cluster, d: Process) -> None:
    """D6. They are no damage; what is left is used, what is gone is stored anew."""
    salt, files = store(cluster)
    before, counted = corrupt(d, "disk"), tier(d, "disk")
    for file in files[2:]:
        file.unlink()
    assert ask(cluster, salt, CASE) == {"disk": 2 * BLOCK_SIZE, "computed": 65 - 2 * BLOCK_SIZE}
    assert corrupt(d, "disk") == before
    wait_stored(d, "disk", 2, counted)
    assert all(file.exists() for file in files)


@pytest.mark.slow
@pytest.mark.parametrize("in_its_place", ["nothing", "a file"])
def test_the_directory_goes_away(cluster: Cluster, d: Process, in_its_place: str) -> None:
    """D1. 1. The directory is deleted while the worker runs.  2. Answers are GOLD; storing stops and says
    so.  3. The directory is there again: so is the tier, without a restart."""
    salt, _ = store(cluster)
    directory, before = directory_of(d), errors(d, "disk")
    shutil.rmtree(directory)
    if in_its_place == "a file":
        directory.touch()
    assert ask(cluster, salt, CASE) == {"computed": 65}
    wait_until(lambda: errors(d, "disk") > before and breaker(d, "disk") > 0, 10)
    ask(cluster, fresh_salt(), CASE)
    assert in_its_place == "a file" or not directory.exists(), (
        "the disk below a lost mount must not be filled"
    )
    directory.unlink(missing_ok=True)
    directory.mkdir()
    wait_resumed(cluster)
    salt, _ = store(cluster)
    assert is_from(ask(cluster, salt, CASE), "disk", CASE)


@pytest.mark.slow
def test_the_directory_cannot_be_made(cluster: Cluster, tmp_path: Path) -> None:
    """D1. 1. A file stands where the directory should be.  2. The worker serves.  3. The file goes: the tier
    begins by itself."""
    (tmp_path / "kv").touch()
    d = cluster.ensure("decode-0", disk_cache_dir=tmp_path / "kv")
    assert ask(cluster, fresh_salt(), CASE) == {"computed": 65}
    assert errors(d, "disk") >= 1
    assert breaker(d, "disk") > 0
    (tmp_path / "kv").unlink()
    wait_resumed(cluster)


def fill(cluster: Cluster, directory: Path, cap_nbytes: int) -> None:
    """Many prompts, one after the other, each GOLD; the directory never outgrows its cap."""
    for _ in range(40):
        ask(cluster, fresh_salt(), CASE, max_tokens=1)
        assert disk_usage(directory) <= cap_nbytes


@pytest.mark.slow
def test_a_cap_of_20_mib_holds(cluster: Cluster, tmp_path: Path) -> None:
    """D1. The cap counts every byte; the oldest make room, the newest are found."""
    d = cluster.ensure("decode-0", disk_cache_dir=tmp_path / "kv", disk_cache_bytes="20MiB")
    fill(cluster, tmp_path / "kv", 20 * 2**20)
    assert d.metric("baton_tier_evicted_blocks_total", tier="disk") > 0
    assert errors(d, "disk") == 0
    before, salt = tier(d, "disk"), fresh_salt()
    ask(cluster, salt, CASE)
    wait_stored(d, "disk", NUM_BLOCKS, before)
    d = cluster.restart("decode-0", disk_cache_dir=tmp_path / "kv", disk_cache_bytes="20MiB")
    assert disk_usage(tmp_path / "kv") <= 20 * 2**20
    assert is_from(ask(cluster, salt, CASE), "disk", CASE)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 20 MB."""
    place = tmp_path / "small"
    place.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=20m,mode=700", "tmpfs", str(place)]
    made = subprocess.run(mount, capture_output=True, text=True)
    if made.returncode:
        pytest.skip(f"mounting a small tmpfs is not allowed here: {made.stderr.strip()}")
    yield place
    subprocess.run(["umount", "--lazy", str(place)], check=True)


@pytest.mark.slow
def test_a_disk_of_20_mb_fills_up(cluster: Cluster, small_disk: Path) -> None:
    """D1. The cap is beyond what the disk has: blocks make room before the disk is full."""
    d = cluster.ensure("decode-0", disk_cache_dir=small_disk / "kv")
    fill(cluster, small_disk, 20 * 2**20)
    assert d.metric("baton_tier_evicted_blocks_total", tier="disk") > 0
    salt, _ = store(cluster)
    assert is_from(ask(cluster, salt, CASE), "disk", CASE)
    cluster.restart("decode-0")  # lets go of the mount


@pytest.mark.slow
def test_killed_while_it_stores(cluster: Cluster, tmp_path: Path, background: ThreadPoolExecutor) -> None:
    """D3, D6. 1. kill -9 once some files of a long prompt are there.  2. The next life counts what is whole
    and deletes the rest.  3. It loads the leading blocks that survived and computes the others."""
    case, salt, directory = "story-500", fresh_salt(), tmp_path / "kv"
    flags = {"disk_cache_dir": directory, "host_cache_bytes": "128MiB", "num_blocks": 40}
    d = cluster.ensure("decode-0", **flags)
    reply = background.submit(cluster.complete, prompt(case), plan="local", cache_salt=salt)
    wait_until(lambda: len(block_files(directory)) >= 3, 30)
    d.kill()
    reply.exception()  # its client sees an error; what that looks like is not of interest here
    files = files_of(directory, case, salt)
    half = files[-1].with_suffix(".kv.tmp")
    half.parent.mkdir(exist_ok=True)
    half.write_bytes(bytes(FILE_NBYTES // 2))
    d = cluster.restart("decode-0", **flags)
    assert not list(directory.rglob("*.tmp"))
    left = block_files(directory)
    assert {file.stat().st_size for file in left} == {FILE_NBYTES}
    num_directories = 1 + sum(path.is_dir() for path in directory.rglob("*"))
    assert tier(d, "disk")["used_nbytes"] == len(left) * FILE_NBYTES + num_directories * DIRECTORY_NBYTES
    whole = next((i for i, file in enumerate(files) if file not in left), len(files))
    assert whole > 0
    moved = ask(cluster, salt, case)
    assert moved == {"disk": whole * BLOCK_SIZE, "computed": 500 - whole * BLOCK_SIZE}
    assert corrupt(d, "disk") == 0
