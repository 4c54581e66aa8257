"""The engine's thread: one bad request harms nobody else, broken books end the loop and say so."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest
import torch
from hash_model import Harness, random_prompt

from core.errors import EngineFault, WorkerLost
from core.request import PrefillTarget, Request, SamplingParams, TokenDelta
from engine.loop import EngineLoop
from engine.messages import Abort, Add, AddPrefill, BlocksBuilt, Command, Event, Failed, LoadOrdered, Quiet
from engine.sequence import PrefillJob

TIMEOUT_S = 10.0


def _planted(*_: object) -> None:
    raise RuntimeError("planted")


class Rig:
    """An engine on the hash model in a loop of its own; events are taken in order."""

    def __init__(self) -> None:
        self.inbox: queue.Queue[Event] = queue.Queue()
        self.harness = Harness(num_blocks=64, block_size=8)
        self.engine = self.harness.engine
        self.engine._emit = lambda events: [self.inbox.put(event) for event in events]
        self.loop = EngineLoop(self.engine)

    def until(self, wanted: Callable[[Event], bool]) -> Event:
        while not wanted(event := self.inbox.get(timeout=TIMEOUT_S)):
            pass
        return event

    def wait_failed(self) -> dict[str, Failed]:
        """Failures by id, once the loop has ended by itself."""
        deadline = time.monotonic() + TIMEOUT_S
        while not self.loop.failed and time.monotonic() < deadline:
            time.sleep(0.002)
        assert self.loop.failed
        assert self.loop.stop(), "the thread has ended"
        events = [self.inbox.get_nowait() for _ in range(self.inbox.qsize())]
        failed = [event for event in events if isinstance(event, Failed)]
        assert len({each.request_id for each in failed}) == len(failed), "each is told once"
        return {each.request_id: each for each in failed}


@pytest.fixture
def rig() -> Iterator[Rig]:
    made = Rig()
    yield made
    assert made.loop.stop()


def _add(name: str, length: int = 12, max_tokens: int = 5, **more: object) -> Add:
    params = SamplingParams(max_tokens=max_tokens, seed=0, temperature=0.0)
    return Add(Request(name, tuple(random_prompt(length)), params, **more))  # type: ignore[arg-type]


def _last_of(name: str) -> Callable[[Event], bool]:
    return lambda e: isinstance(e, TokenDelta) and e.request_id == name and e.finish_reason is not None


def test_answers_and_ends_when_asked(rig) -> None:
    rig.loop.start()
    rig.loop.submit(_add("r"))
    rig.until(_last_of("r"))
    assert rig.loop.stop()
    assert not rig.loop.failed


@pytest.mark.parametrize(
    "bad",
    [
        _add("bad", block_hashes=3),
        Add(Request("bad", (-1, 2), SamplingParams(max_tokens=2, seed=0))),
        AddPrefill(PrefillJob("bad", (2**40,) * 8)),
    ],
)
def test_what_cannot_be_taken_up_fails_alone(rig, bad: Command) -> None:
    rig.loop.start()
    rig.loop.submit(_add("good"), bad)
    failed = rig.until(lambda e: isinstance(e, Failed))
    assert (failed.request_id, type(failed.error)) == ("bad", EngineFault)
    rig.until(_last_of("good"))
    rig.loop.submit(_add("next"))
    rig.until(_last_of("next"))
    assert not rig.loop.failed
    assert rig.loop.stats.step_failures == 1


@pytest.mark.parametrize("broken", ["schedule", "stats", "changed", "command"])
def test_broken_books_fail_everything_open_and_end_the_loop(rig, monkeypatch, broken: str) -> None:
    """1. One request each runs, waits and loads; a job is held. 2. The loop breaks outside a step.
    3. All of them fail, and so do those still in the queue. 4. The thread ends, `failed` is true."""
    scheduler, breaking = rig.engine.scheduler, []
    rig.loop.start(lambda: _planted() if breaking == ["changed"] else None)
    rig.loop.submit(AddPrefill(PrefillJob("held", tuple(random_prompt(16, 9)))))
    rig.until(lambda e: isinstance(e, BlocksBuilt))
    rig.loop.submit(_add("loading", 20, prefill=PrefillTarget("p0", "127.0.0.1:1", "life")))
    rig.until(lambda e: isinstance(e, LoadOrdered))
    rig.loop.submit(_add("running", max_tokens=400), _add("waiting", 480))
    rig.until(lambda e: isinstance(e, TokenDelta))
    if broken in ("schedule", "stats"):
        monkeypatch.setattr(scheduler if broken == "schedule" else rig.engine, broken, _planted)
    elif broken == "command":
        monkeypatch.setattr(scheduler.pool, "quiet", _planted)
        rig.loop.submit(Quiet((1,)), _add("queued"), Abort("nobody"), AddPrefill(PrefillJob("too", (1,) * 8)))
    breaking.append(broken)
    failed = rig.wait_failed()
    queued = {"queued", "too"} if broken == "command" else set()
    assert set(failed) == {"held", "loading", "running", "waiting"} | queued
    assert {type(each.error) for each in failed.values()} == {WorkerLost}
    assert "RuntimeError" in failed["running"].error.message


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_listener_that_raises_does_not_hide_the_failure(rig) -> None:
    rig.engine._emit = _planted
    rig.loop.start()
    rig.loop.submit(_add("r"))
    assert rig.wait_failed() == {}


def test_work_shows_before_the_step_that_begins_it_has_ended(rig) -> None:
    """1. A long step runs. 2. What it computes is in the stats meanwhile, and so is what comes now. 3. Both are
    taken up, and count once."""
    entered, go_on = threading.Event(), threading.Event()
    run, changes = rig.harness.runner.run, []

    def slow(batch: object) -> torch.Tensor:
        entered.set()
        assert go_on.wait(TIMEOUT_S)
        return run(batch)

    rig.harness.runner.run = slow
    rig.loop.start(lambda: changes.append(rig.loop.stats))
    rig.loop.submit(_add("first", 12))
    assert entered.wait(TIMEOUT_S)
    stats = rig.loop.stats
    assert (stats.running + stats.waiting, stats.queued_tokens) == (1, 12)
    assert rig.loop.step_s > 0
    rig.loop.submit(_add("second", 20), AddPrefill(PrefillJob("job", tuple(random_prompt(16)))), Abort("no"))
    stats = rig.loop.stats
    assert (stats.running + stats.waiting, stats.queued_tokens) == (3, 48)
    assert changes[-1] == stats, "whoever listens is told at once"
    go_on.set()
    rig.until(_last_of("second"))
    rig.loop.submit(Abort("job"))
    deadline = time.monotonic() + TIMEOUT_S
    while (stats := rig.loop.stats).running + stats.waiting + stats.held and time.monotonic() < deadline:
        time.sleep(0.002)
    assert (stats.running, stats.waiting, stats.held, stats.queued_tokens) == (0, 0, 0, 0)
    assert rig.loop.step_s == 0


def test_a_request_has_waited_since_the_worker_got_it(rig) -> None:
    command = replace(_add("r"), arrived_s=rig.engine._clock() - 5)
    rig.loop.start()
    rig.loop.submit(command)
    delta = rig.until(lambda e: isinstance(e, TokenDelta))
    assert isinstance(delta, TokenDelta)
    assert delta.gathered is not None
    assert delta.gathered.queue_s == pytest.approx(5)


def test_a_step_that_raises_is_no_failure_of_the_loop(rig) -> None:
    rig.harness.runner.fail_at = 2
    rig.loop.start()
    rig.loop.submit(_add("bad"))
    assert rig.until(lambda e: isinstance(e, Failed)).request_id == "bad"
    rig.loop.submit(_add("good"))
    rig.until(_last_of("good"))
    assert not rig.loop.failed


def test_a_step_that_cannot_be_measured_is_none_that_raised(rig, monkeypatch) -> None:
    """Its tokens are made; whatever broke is not the requests' doing."""
    monkeypatch.setattr(rig.engine.scheduler.times, "measured", _planted)
    rig.loop.start()
    rig.loop.submit(_add("a"))
    assert rig.wait_failed().keys() == {"a"}
    assert rig.engine.step_failures == 0


def test_a_lost_accelerator_is_one(rig, monkeypatch) -> None:
    """Its context is gone for good: only a new process helps, and the worker ends to be started again."""

    def lost(_: object) -> torch.Tensor:
        raise torch.AcceleratorError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(rig.harness.runner, "run", lost)
    rig.loop.start()
    rig.loop.submit(_add("r"))
    assert set(rig.wait_failed()) == {"r"}
    assert rig.loop.failed


def test_a_lost_rank_is_one_and_its_requests_may_be_sent_again(rig, monkeypatch) -> None:
    def lost(_: object) -> torch.Tensor:
        raise WorkerLost("a rank ended; try again")

    monkeypatch.setattr(rig.harness.runner, "run", lost)
    rig.loop.start()
    rig.loop.submit(_add("r"))
    (failed,) = rig.wait_failed().values()
    assert isinstance(failed.error, WorkerLost)
    assert failed.error.message == "a rank ended; try again"
