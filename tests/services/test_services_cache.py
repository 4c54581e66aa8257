"""`baton cache` on real directories and a real Redis: what it lists, finds, deletes, and says when it cannot."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from redis_process import RedisServer

from kvtransfer.disk_files import BlockFiles
from kvtransfer.disk_tier import DiskTier
from kvtransfer.redis_tier import RedisTier
from services import cache, cli

NBYTES = 10_000
ONE, OTHER = bytes([0x11]) * 32, bytes([0x22]) * 32
ONE_NAME, OTHER_NAME = "11" * 8, "22" * 8
FILE_NBYTES = BlockFiles("/", ONE, NBYTES).file_nbytes


def block(i: int) -> tuple[bytes, memoryview]:
    return bytes([i]) * 32, memoryview(bytes([i, 255 - i]) * (NBYTES // 2))


def fill_disk(directory: Path, namespace: bytes, count: int) -> None:
    async def fill() -> None:
        tier = DiskTier(BlockFiles(directory, namespace, NBYTES), 2**24, 5.0)
        assert await tier.opened()
        assert await tier.store([block(i) for i in range(count)]) == count
        await tier.close()

    asyncio.run(fill())


def fill_redis(url: str, namespace: bytes, count: int) -> None:
    async def fill() -> None:
        tier = RedisTier(url, namespace, NBYTES, 600.0, 5.0)
        assert await tier.store([block(i) for i in range(count)]) == count
        await tier.close()

    asyncio.run(fill())


@pytest.fixture(autouse=True)
def _logs(monkeypatch: pytest.MonkeyPatch) -> None:
    """The command would bind this process's loggers to a stderr that ends with the test."""
    monkeypatch.setattr("core.log.configure", lambda *args, **bound: None)


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """Two models' blocks, as a worker of `baton serve` leaves them."""
    worker = tmp_path / "kv" / "decode-0"
    fill_disk(worker, ONE, 5)
    fill_disk(worker, OTHER, 3)
    (worker / "notes.txt").write_text("not ours")
    return worker


@pytest.fixture(scope="module")
def shared_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    server = RedisServer(tmp_path_factory.mktemp("redis"))
    yield server
    server.stop()


@pytest.fixture
def server(shared_server: RedisServer) -> RedisServer:
    with shared_server.client() as client:
        client.flushall()
        client.set("somebody-elses", "x")
        client.set("baton:kv:not-a-block", "x")
    fill_redis(shared_server.url, ONE, 5)
    fill_redis(shared_server.url, OTHER, 3)
    return shared_server


def baton(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str, str]:
    """(exit status, stdout, stderr) of `baton cache`."""
    status = cli.main(["cache", *map(str, arguments)])
    out = capsys.readouterr()
    return status, out.out, out.err


def files_in(directory: Path) -> list[Path]:
    return sorted(directory.rglob("*.kv*"))


@pytest.mark.parametrize("above", [False, True])
def test_ls_groups_by_namespace(directory: Path, capsys: pytest.CaptureFixture[str], above: bool) -> None:
    three_hours = 3 * 3600
    oldest = next(file for file in files_in(directory) if ONE_NAME in str(file))
    os.utime(oldest, (oldest.stat().st_atime, oldest.stat().st_mtime - three_hours))
    status, out, err = baton(capsys, "ls", "--disk-cache-dir", directory.parent if above else directory)
    lines = [line.split() for line in out.splitlines()]
    assert (status, err) == (0, "")
    assert lines[0] == [str(directory)]
    assert lines[2][:4] == [ONE_NAME, "5", f"{5 * FILE_NBYTES / 1024:.1f}", "KiB"]
    assert lines[2][-2:] == ["3", "h"]
    assert lines[3][:4] == [OTHER_NAME, "3", f"{3 * FILE_NBYTES / 1024:.1f}", "KiB"]


def test_stat_sums_up(directory: Path, server: RedisServer, capsys: pytest.CaptureFixture[str]) -> None:
    (files_in(directory)[0].parent / f"{'0' * 64}.kv.tmp").write_bytes(b"half")
    status, out, _ = baton(capsys, "stat", "--disk-cache-dir", directory, "--redis-url", server.url)
    assert status == 0
    disk, redis = out.split("unix://")
    facts = [dict(line.strip().split("  ", 1) for line in part.splitlines()[1:]) for part in (disk, redis)]
    read = [{name: value.strip() for name, value in each.items()} for each in facts]
    for each in read:
        assert (each["namespaces"], each["blocks"]) == ("2", "8")
    assert read[0]["incomplete files"] == "1"
    assert read[1]["maxmemory-policy"] == "noeviction"


def test_verify_names_what_is_damaged_and_deletes_it_when_told(
    directory: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """1. Cut short.  2. A flipped byte.  3. Another block's bytes.  4. Another model's.  5. Never finished."""
    files = BlockFiles(directory, ONE, NBYTES)
    paths = [directory / files.path(block(i)[0]) for i in range(5)]
    foreign = directory / BlockFiles(directory, OTHER, NBYTES).path(block(0)[0])
    os.truncate(paths[0], 5000)
    data = bytearray(paths[1].read_bytes())
    data[6000] ^= 1
    paths[1].write_bytes(data)
    paths[2].write_bytes(paths[3].read_bytes())
    paths[4].write_bytes(foreign.read_bytes())
    unfinished = paths[3].with_suffix(".kv.tmp")
    unfinished.write_bytes(b"half")
    status, out, _ = baton(capsys, "verify", "--disk-cache-dir", directory)
    said = dict(line.split() for line in out.splitlines()[1:-1])
    bad = {paths[0]: "length", paths[1]: "checksum", paths[2]: "block_hash", paths[4]: "namespace"}
    bad[unfinished] = "incomplete"
    assert said == {str(path.relative_to(directory)): mismatch for path, mismatch in bad.items()}
    assert status == 1
    assert out.endswith("  9 checked, 5 damaged\n")
    assert all(path.exists() for path in bad)
    status, out, _ = baton(capsys, "verify", "--delete", "--disk-cache-dir", directory)
    assert (status, out.splitlines()[-1]) == (0, "  9 checked, 5 damaged and deleted")
    assert not any(path.exists() for path in bad)
    status, out, _ = baton(capsys, "verify", "--disk-cache-dir", directory)
    assert (status, out.splitlines()[-1]) == (0, "  4 checked, 0 damaged")


def test_clear_leaves_what_is_not_ours_and_wants_a_yes(
    directory: Path, server: RedisServer, capsys: pytest.CaptureFixture[str]
) -> None:
    named = ("--disk-cache-dir", directory, "--redis-url", server.url)
    status, out, err = baton(capsys, "clear", *named)
    assert (status, out) == (2, "")
    assert "--yes" in err
    assert len(files_in(directory)) == 8
    status, out, _ = baton(capsys, "clear", "--yes", *named)
    assert status == 0
    assert out.count("  8 deleted\n") == 2
    assert files_in(directory) == []
    assert sorted(path.name for path in directory.iterdir()) == [".lock", "notes.txt"]
    with server.client(decode_responses=True) as client:
        assert sorted(client.keys("*")) == ["baton:kv:not-a-block", "somebody-elses"]  # pyright: ignore
    status, out, _ = baton(capsys, "ls", *named)
    assert (status, out.count("  no blocks\n")) == (0, 2)


def test_redis_is_listed_and_verified_in_batches(
    server: RedisServer, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cache, "AT_ONCE", 3)
    monkeypatch.setattr(cache, "VALUES_NBYTES", 2 * NBYTES)
    with server.client() as client:
        client.config_resetstat()
    status, out, _ = baton(capsys, "ls", "--redis-url", server.url)
    with server.client() as client:
        used = {name.removeprefix("cmdstat_") for name in client.info("commandstats")}  # pyright: ignore
    assert used - {"client", "config|resetstat", "config", "info", "hello", "select"} == {
        "scan",
        "strlen",
        "pttl",
    }
    lines = [line.split() for line in out.splitlines()]
    assert status == 0
    assert [line[:2] for line in lines[2:]] == [[ONE_NAME, "5"], [OTHER_NAME, "3"]]
    assert lines[2][-2:] == ["10", "min"]
    keys = [f"baton:kv:{ONE_NAME}:{block(i)[0].hex()}" for i in range(3)]
    with server.client() as client:
        client.setrange(keys[0], 4000, b"flip")
        client.delete(keys[1])
        client.rpush(keys[1], "a list")
        client.copy(f"baton:kv:{ONE_NAME}:{block(3)[0].hex()}", keys[2], replace=True)
    status, out, _ = baton(capsys, "verify", "--redis-url", server.url)
    said = dict(line.split() for line in out.splitlines()[1:-1])
    assert (status, said) == (1, dict(zip(keys, ["checksum", "type", "block_hash"], strict=True)))
    status, out, _ = baton(capsys, "verify", "--delete", "--redis-url", server.url)
    assert status == 0
    status, out, _ = baton(capsys, "verify", "--redis-url", server.url)
    assert (status, out.splitlines()[-1]) == (0, "  5 checked, 0 damaged")


def test_a_directory_in_use_is_left_alone_and_the_others_are_done(
    directory: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    second = directory.parent / "decode-1"
    fill_disk(second, ONE, 2)
    code = (
        "import sys; from pathlib import Path; from kvtransfer.disk_walk import lock; lock(Path(sys.argv[1]));"
        "print('mine', flush=True); sys.stdin.read()"
    )
    root = Path(cache.__file__).parents[1]
    worker = subprocess.Popen(
        [sys.executable, "-c", code, directory],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=os.environ | {"PYTHONPATH": str(root)},
    )
    try:
        assert worker.stdout is not None
        assert worker.stdout.readline() == b"mine\n"
        status, out, err = baton(capsys, "clear", "--yes", "--disk-cache-dir", directory.parent)
        assert status == 1
        assert (
            err == f"baton: {directory} is in use by process {worker.pid}; stop that worker and try again\n"
        )
        assert out.endswith(f"{second}\n  2 deleted\n")
        assert f"{directory}\n" not in out
    finally:
        worker.communicate()
    assert len(files_in(directory)) == 8
    assert baton(capsys, "clear", "--yes", "--disk-cache-dir", directory)[0] == 0


@pytest.mark.parametrize(
    ("arguments", "status", "sentence"),
    [
        (["ls"], 2, "which cache"),
        (["ls", "--disk-cache-dir", "/nonexistent"], 2, "there is no cache in /nonexistent"),
        (["ls", "--redis-url", "http://x"], 2, "begins with none of"),
        (
            ["ls", "--redis-url", "redis://:secret@127.0.0.1:1"],
            1,
            "Redis at redis://127.0.0.1:1 cannot be asked",
        ),
        (["verify", "--host-cache-bytes", "1"], 2, "is not a setting"),
    ],
)
def test_one_sentence_says_what_is_wrong(
    arguments: list[str], status: int, sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    got, _, err = baton(capsys, *arguments)
    assert got == status
    assert sentence in err
    assert err.count("\n") == 1
    assert "secret" not in err
