"""The engine's thread: takes commands, steps while there is work, sleeps otherwise."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

from core import log
from core.clock import Clock, monotonic
from core.errors import WorkerLost
from engine.engine import Engine
from engine.messages import Add, AddPrefill, Command, EngineStats

_log = log.get("engine")

IDLE_TURN_S = 0.5
"""Longest sleep without work, so that a stopped loop shows in its heartbeat."""


class _Work(NamedTuple):
    """Requests and jobs, and tokens of their prompts, that came since the beginning."""

    count: int = 0
    tokens: int = 0

    def and_of(self, work: Add | AddPrefill, block_size: int) -> _Work:
        return _Work(self.count + 1, self.tokens + work.num_tokens(block_size))


class EngineLoop:
    """Runs one engine on a thread of its own; `submit` may be called from any thread.

    The command queue has no limit of its own and needs none: every turn empties it, and what can
    gather in one step is bounded by the open requests (an Add and a few aborts and load reports
    each). Of those the router's admission and the prefill worker's leases allow a fixed number.
    """

    def __init__(self, engine: Engine, clock: Clock = monotonic) -> None:
        self._engine, self._clock = engine, clock
        self._commands: queue.SimpleQueue[Command | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._size = engine.scheduler.limits.block_size
        self._lock = threading.Lock()
        self._submitted = self._handled = _Work()
        self._shown = engine.stats(), _Work()
        """The state, and the work that it counts."""
        self._turned_at = clock()
        self._step_began_at: float | None = None
        self._changed: Callable[[], None] = lambda: None
        self._failed = False

    def start(self, changed: Callable[[], None] | None = None) -> None:
        """Begin; `changed` is called, on whatever thread, when the stats have changed."""
        self._changed = changed or self._changed
        self._thread.start()

    def submit(self, *commands: Command) -> None:
        """Queue commands for the next turn; never blocks. Once `failed`, nobody answers them."""
        work = [command for command in commands if isinstance(command, Add | AddPrefill)]
        with self._lock:
            for each in work:
                self._submitted = self._submitted.and_of(each, self._size)
        for command in commands:
            self._commands.put(command)
        if work:
            self._changed()

    def stop(self, timeout_s: float = 10.0) -> bool:
        """Ask the thread to end after its step; False when it did not within `timeout_s`."""
        self._commands.put(None)
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    @property
    def stats(self) -> EngineStats:
        """The state before or after the last step; what was submitted since then waits. Never blocks."""
        stats, counted = self._shown
        submitted = self._submitted  # read last: it is never less than what is counted
        if submitted == counted:
            return stats
        return replace(
            stats,
            waiting=stats.waiting + submitted.count - counted.count,
            queued_tokens=stats.queued_tokens + submitted.tokens - counted.tokens,
        )

    @property
    def idle_s(self) -> float:
        """Seconds since the loop last turned; grows without bound when a step hangs."""
        return self._clock() - self._turned_at

    @property
    def step_s(self) -> float:
        """Seconds since the step that runs began; 0 while none does."""
        began_at = self._step_began_at
        return 0.0 if began_at is None else self._clock() - began_at

    @property
    def failed(self) -> bool:
        """The loop broke outside a step's model run and has ended; only a new process helps.

        Turns true after Failed was emitted for everything open, and never back.
        """
        return self._failed

    def _run(self) -> None:
        try:
            self._turn_until_stopped()
        except Exception as error:  # the books may be wrong: going on could mix up requests
            _log.error("engine.failed", exc_info=error)
            self._give_up(error)

    def _turn_until_stopped(self) -> None:
        busy = False
        while self._drain(block=not busy):
            self._show()  # a step may be long, and routers should see what it has to do
            self._step_began_at = self._clock()
            busy = self._engine.step()
            self._step_began_at = None
            self._show()

    def _show(self) -> None:
        self._turned_at = self._clock()
        shown = self._engine.stats(), self._handled
        if shown != self._shown:
            self._shown = shown
            self._changed()

    def _give_up(self, error: Exception) -> None:
        broke = WorkerLost(f"the engine of this worker broke ({type(error).__name__}); try again")
        fault = error if isinstance(error, WorkerLost) else broke
        try:
            self._engine.fail_all(fault, self._not_taken_up())
        finally:
            self._failed = True

    def _drain(self, *, block: bool) -> bool:
        """Apply all waiting commands; False when asked to stop."""
        try:
            command = self._commands.get(block=block, timeout=IDLE_TURN_S if block else None)
            while True:
                if command is None:
                    return False
                if isinstance(command, Add | AddPrefill):
                    self._handled = self._handled.and_of(command, self._size)
                self._engine.handle(command)
                command = self._commands.get_nowait()
        except queue.Empty:
            return True

    def _not_taken_up(self) -> list[str]:
        """Ids of requests and jobs that still lie in the queue; empties it."""
        ids: list[str] = []
        while not self._commands.empty():
            match self._commands.get():
                case Add(request):
                    ids.append(request.request_id)
                case AddPrefill(job):
                    ids.append(job.job_id)
        return ids
