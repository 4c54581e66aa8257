"""Threads and buffers that outlive whoever waits for them."""

import os
import subprocess
import sys
import threading
from concurrent.futures import Future
from pathlib import Path

import pytest

from kvtransfer.disk_files import BlockFiles
from kvtransfer.gate import Gate
from kvtransfer.threads import DaemonThreads

NBYTES = 4096
ROOT = Path(__file__).parent.parent.parent

HANGING = """
import asyncio, sys, threading
from pathlib import Path
from kvtransfer.disk_files import BlockFiles
from kvtransfer.disk_tier import DiskTier
from kvtransfer.store_policy import StorePolicy
from kvtransfer.region import Region
from kvtransfer.tier_pool import RegionPool
from kvtransfer.tier_stack import TierStack

class Dead(BlockFiles):
    def read(self, *_):
        threading.Event().wait()

async def main():
    tier = DiskTier(Dead(Path(sys.argv[1]), bytes(32), 4096), 2**20, 0.1)
    stack = TierStack(RegionPool(Region.create(1, 4096, "life")), 2**20, [tier], StorePolicy.WRITE_THROUGH)
    await tier.opened()
    assert await tier.store([(bytes(32), memoryview(bytes(4096)))]) == 1
    assert await stack.load("disk", [bytes(32)], [0], print) == 0
    await stack.close(drain_s=0.1)

asyncio.run(main())
print("left")
"""


def test_jobs_end_in_their_futures() -> None:
    threads = DaemonThreads(2, "test")
    assert threads.submit(divmod, 7, 2).result(10) == (3, 1)
    with pytest.raises(ZeroDivisionError):
        threads.submit(divmod, 7, 0).result(10)
    assert threads.submit(divmod, 9, 2).result(10) == (4, 1)
    threads.close()
    threads.close()
    with pytest.raises(RuntimeError, match="take no more jobs"):
        threads.submit(divmod, 7, 2)


def test_what_was_taken_before_close_is_done_and_the_threads_end() -> None:
    threads, go = DaemonThreads(1, "closing"), threading.Event()
    waiting, cancelled, last = (threads.submit(job) for job in (lambda: go.wait(10), int, int))
    assert cancelled.cancel()
    threads.close()
    go.set()
    assert waiting.result(10)
    assert last.result(10) == 0
    for thread in threading.enumerate():
        if thread.name.startswith("closing"):
            thread.join(10)
            assert not thread.is_alive()


def test_a_process_ends_though_its_disk_hangs(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", HANGING, str(tmp_path / "kv")],
        capture_output=True,
        text=True,
        timeout=60,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
    )
    assert (done.returncode, done.stdout[-5:]) == (0, "left\n"), done.stderr


def test_a_gate_lets_several_copy_and_closes_behind_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """1. Two copies run at the same time. 2. Closing waits for both. 3. None begins afterwards."""
    both, go, closed = threading.Barrier(3), threading.Event(), threading.Event()

    def slow(target: memoryview, source: memoryview) -> None:
        both.wait(10)
        go.wait(10)
        assert not closed.is_set()

    monkeypatch.setattr("kvtransfer.gate.copy", slow)
    gate, threads = Gate(), DaemonThreads(3, "test")
    target, source = memoryview(bytearray(NBYTES)), memoryview(bytes(NBYTES))
    copies: list[Future[bool]] = [threads.submit(gate.copy, target, source) for _ in range(2)]
    both.wait(10)
    closing = threads.submit(lambda: (gate.close(), closed.set()))
    go.set()
    assert [copy.result(10) for copy in copies] == [True, True]
    closing.result(10)
    assert not gate.copy(target, source)
    threads.close()


def test_a_write_whose_caller_leaves_after_the_rename_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files, gate, block_hash = BlockFiles(tmp_path, bytes(32), NBYTES), Gate(), bytes(32)
    rename = os.rename

    def rename_and_leave(source: str, target: Path) -> None:
        rename(source, target)
        gate.close()

    monkeypatch.setattr(os, "rename", rename_and_leave)
    assert files.write(files.path(block_hash), block_hash, memoryview(bytes(NBYTES)), gate, 0)
    assert (tmp_path / files.path(block_hash)).exists()
