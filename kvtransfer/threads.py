"""Threads that the process does not wait for when it ends.

Those of `ThreadPoolExecutor` are joined by the interpreter: one that hangs in a read from a dead disk would
keep the process alive after SIGTERM.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from queue import SimpleQueue
from typing import Any, TypeVar

T = TypeVar("T")


class DaemonThreads:
    """`count` threads, started with the first job. Jobs begin in the order in which they came."""

    def __init__(self, count: int, name: str) -> None:
        self._count, self._name = count, name
        self._lock = threading.Lock()
        self._jobs: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._started = self._closed = False

    def submit(self, function: Callable[..., T], *args: Any) -> Future[T]:
        """Raises RuntimeError after `close`."""
        future: Future[T] = Future()
        with self._lock:
            if self._closed:
                raise RuntimeError(f"the threads {self._name} take no more jobs")
            if not self._started:
                self._started = True
                for i in range(self._count):
                    threading.Thread(target=self._run, name=f"{self._name}-{i}", daemon=True).start()
            self._jobs.put(partial(_finish, future, partial(function, *args)))
        return future

    def close(self) -> None:
        """Each thread ends once the jobs taken so far are done. Does not wait; idempotent."""
        with self._lock:
            if not self._closed:
                self._closed = True
                for _ in range(self._count):
                    self._jobs.put(None)

    def _run(self) -> None:
        while job := self._jobs.get():
            job()
            del job  # it keeps buffers alive


def _finish(future: Future[T], function: Callable[[], T]) -> None:
    if not future.set_running_or_notify_cancel():
        return
    try:
        result = function()
    except BaseException as error:
        future.set_exception(error)
    else:
        future.set_result(result)
