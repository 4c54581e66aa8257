"""The engine's thread: takes commands, steps while there is work, sleeps otherwise."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable

from core import log
from core.clock import Clock, monotonic
from core.errors import EngineFault, WorkerLost
from engine.engine import Engine
from engine.messages import Add, AddPrefill, Command, EngineStats

_log = log.get("engine")

IDLE_TURN_S = 0.5
"""Longest sleep without work, so that a stopped loop shows in its heartbeat."""


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
        self._stats = engine.stats()
        self._turned_at = clock()
        self._changed: Callable[[], None] = lambda: None
        self._failed = False

    def start(self, changed: Callable[[], None] | None = None) -> None:
        """Begin; `changed` is called on the engine's thread after each turn that changed the stats."""
        self._changed = changed or self._changed
        self._thread.start()

    def submit(self, *commands: Command) -> None:
        """Queue commands for the next turn; never blocks. Once `failed`, nobody answers them."""
        for command in commands:
            self._commands.put(command)

    def stop(self, timeout_s: float = 10.0) -> bool:
        """Ask the thread to end after its step; False when it did not within `timeout_s`."""
        self._commands.put(None)
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    @property
    def stats(self) -> EngineStats:
        """The state after the last turn; never blocks."""
        return self._stats

    @property
    def idle_s(self) -> float:
        """Seconds since the loop last turned; grows without bound when a step hangs."""
        return self._clock() - self._turned_at

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
            busy = self._engine.step()
            self._turned_at = self._clock()
            stats = self._engine.stats()
            if stats != self._stats:
                self._stats = stats
                self._changed()

    def _give_up(self, error: Exception) -> None:
        broke = EngineFault(f"the engine of this worker broke ({type(error).__name__}); try again")
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
