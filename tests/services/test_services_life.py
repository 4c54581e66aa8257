"""A worker drains for another role or for good: who is told what, and when."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from core.errors import InvalidParameter, Unavailable
from core.settings import Settings
from services.worker.host import Phase, WorkerHost
from services.worker.hub import Hub
from services.worker.life import Life

GRACE_S = 0.1


class Worker:
    """A host whose engine runs what the test says; `seen` is what listeners were told."""

    def __init__(self, **settings: Any) -> None:
        self.stats = SimpleNamespace(running=0, waiting=0, loading=0, held=0)
        self.roles: list[str] = []
        self.host = WorkerHost(
            Settings(**{"shutdown_grace_s": GRACE_S, "drain_timeout_s": 5.0} | settings),
            "decode", "w", "1", Hub(),
            _built=SimpleNamespace(loop=SimpleNamespace(stats=self.stats), failed=False),  # type: ignore[arg-type]
            _metrics=SimpleNamespace(advertised=self.roles.append),  # type: ignore[arg-type]
        )  # fmt: skip
        self.life = Life(self.host)
        self.seen: list[tuple[str, str, bool]] = []
        self.host.ready("decode")
        self.host.listeners.append(self._note)

    def _note(self) -> None:
        self.seen.append((self.host.phase.value, self.host.role, self.host.takes_work))

    async def until(self, *last: str | bool) -> None:
        async with asyncio.timeout(5):
            while not self.seen or self.seen[-1] != last:
                await asyncio.sleep(0.005)


@pytest.fixture
async def worker() -> Worker:
    return Worker()


async def test_a_change_drains_switches_and_announces(worker: Worker):
    """1. A sequence runs.  2. The role is to change: not ready at once, new work is taken for a moment, then
    refused.  3. The sequence ends.  4. The worker is ready in its new role."""
    worker.stats.running = 1
    worker.life.change_role("prefill")
    await worker.until("draining", "decode", True)
    worker.host.require_ready()
    await worker.until("draining", "decode", False)
    with pytest.raises(Unavailable, match="w is draining; ask another one"):
        worker.host.require_ready()
    worker.stats.running = 0
    await worker.until("ready", "prefill", True)
    assert worker.roles == ["decode", "prefill"]
    assert len(worker.seen) == 3


async def test_what_still_runs_at_the_bound_goes_on_in_the_new_role():
    worker = Worker(drain_timeout_s=0.1, shutdown_grace_s=0)
    worker.stats.held = 1
    worker.life.change_role("prefill")
    await worker.until("ready", "prefill", True)


async def test_a_request_that_the_engine_has_not_heard_of_is_work(worker: Worker):
    worker.host.hub.register("r", lambda _: None)
    leaving = asyncio.create_task(worker.life.leave(0))
    await worker.until("draining", "decode", False)
    await asyncio.sleep(0.1)
    assert not leaving.done()
    worker.host.hub.unregister("r")
    assert await asyncio.wait_for(leaving, 5) == 0


class TestChangesMeet:
    async def test_the_same_twice_is_one(self, worker: Worker):
        worker.life.change_role("prefill")
        worker.life.change_role("prefill")
        await worker.until("ready", "prefill", True)
        assert [phase for phase, *_ in worker.seen] == ["draining", "draining", "ready"]

    async def test_back_again_before_it_is_done(self, worker: Worker):
        worker.stats.running = 1
        worker.life.change_role("prefill")
        await worker.until("draining", "decode", True)
        worker.life.change_role("decode")
        assert worker.seen[-1] == ("ready", "decode", True)
        await asyncio.sleep(2 * GRACE_S)
        assert worker.seen[-1] == ("ready", "decode", True), "nothing is left of the change"

    async def test_leaving_ends_a_change(self, worker: Worker):
        worker.stats.running = 1
        worker.life.change_role("prefill")
        leaving = asyncio.create_task(worker.life.leave(0))
        await worker.until("draining", "decode", False)
        worker.stats.running = 0
        assert await asyncio.wait_for(leaving, 5) == 0
        assert (worker.host.phase, worker.host.role) == (Phase.DRAINING, "decode")
        with pytest.raises(Unavailable, match="w is stopping"):
            worker.life.change_role("prefill")


@pytest.mark.parametrize("role", ["", "both", "PREFILL"])
async def test_a_role_that_does_not_exist(worker: Worker, role: str):
    with pytest.raises(InvalidParameter, match="prefill or decode"):
        worker.life.change_role(role)
    assert worker.seen == []


async def test_leaving_is_bounded_and_says_what_is_left():
    worker = Worker(drain_timeout_s=0.1)
    worker.stats.running, worker.stats.waiting = 2, 1
    assert await asyncio.wait_for(worker.life.leave(0), 5) == 3


async def test_a_broken_engine_is_not_waited_for(worker: Worker):
    worker.stats.running = 2
    worker.host.built.failed = True  # type: ignore[misc]
    assert await asyncio.wait_for(worker.life.leave(0), 2) == 2
