"""The engine's thread: takes commands, steps while there is work, sleeps otherwise."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from dataclasses import replace

from core import log
from core.clock import Clock, monotonic
from engine.engine import Engine
from engine.messages import Command, EngineStats

_log = log.get("engine")

IDLE_TURN_S = 0.5
"""Longest sleep without work, so that a stopped loop shows in its heartbeat."""


class EngineLoop:
    """Runs one engine on a thread of its own; `submit` may be called from any thread."""

    def __init__(self, engine: Engine, clock: Clock = monotonic) -> None:
        self._engine, self._clock = engine, clock
        self._commands: queue.SimpleQueue[Command | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._stats = engine.stats()
        self._turned_at = clock()
        self._changed: Callable[[], None] = lambda: None

    def start(self, changed: Callable[[], None] | None = None) -> None:
        """Begin; `changed` is called on the engine's thread after each turn that changed the stats."""
        self._changed = changed or self._changed
        self._thread.start()

    def submit(self, *commands: Command) -> None:
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

    def _run(self) -> None:
        busy = False
        while self._drain(block=not busy):
            busy = self._engine.step()
            self._turned_at = self._clock()
            stats = self._engine.stats()
            if stats != self._stats:
                self._stats = stats
                self._changed()

    def _drain(self, *, block: bool) -> bool:
        """Apply all waiting commands; False when asked to stop."""
        try:
            command = self._commands.get(block=block, timeout=IDLE_TURN_S if block else None)
            while True:
                if command is None:
                    return False
                self._apply(command)
                command = self._commands.get_nowait()
        except queue.Empty:
            return True

    def _apply(self, command: Command) -> None:
        try:
            self._engine.handle(command)
        except Exception as error:  # one bad command must not end the engine for everybody
            self._engine.step_failures += 1
            _log.error("engine.command_failed", command=type(command).__name__, exc_info=error)


def idle(stats: EngineStats) -> bool:
    """Nothing runs, waits, loads or is held, and every block is free."""
    at_rest = replace(stats, running=0, waiting=0, loading=0, held=0) == stats
    return at_rest and stats.free_blocks == stats.total_blocks
