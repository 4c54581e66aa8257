"""Carries engine events from the engine's thread to whoever waits for them on the event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from core import log
from core.request import TokenDelta
from engine.messages import BlocksBuilt, Event, JobStarted, LoadCancelled, LoadOrdered

_log = log.get("worker")

Handler = Callable[[Event], None]
"""Takes one event; must not block and must not raise."""


class Hub:
    """Handlers by request or job id. All methods but `emit` belong to the event loop's thread."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._handlers: dict[str, Handler] = {}
        # Loads outlive the interest in their request: blocks in flight have to be accounted for.
        self.on_load: Handler = self._no_loader

    def emit(self, events: list[Event]) -> None:
        """Called on the engine's thread with a step's events; one wake-up of the loop per step."""
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._dispatch, events)

    def register(self, request_id: str, handler: Handler) -> bool:
        """False when the id is taken."""
        if request_id in self._handlers:
            return False
        self._handlers[request_id] = handler
        return True

    def unregister(self, request_id: str) -> None:
        self._handlers.pop(request_id, None)

    @property
    def num_registered(self) -> int:
        return len(self._handlers)

    def _dispatch(self, events: list[Event]) -> None:
        for event in events:
            if isinstance(event, (LoadOrdered, LoadCancelled)):
                handler = self.on_load
            else:
                is_job = isinstance(event, (JobStarted, BlocksBuilt))
                handler = self._handlers.get(event.job_id if is_job else event.request_id)
            if handler is None:
                continue  # its owner has left; the abort is on its way
            try:
                handler(event)
            except Exception as error:
                kind = "delta" if isinstance(event, TokenDelta) else type(event).__name__
                _log.error("hub.handler_failed", event_kind=kind, exc_info=error)

    @staticmethod
    def _no_loader(event: Event) -> None:
        raise AssertionError(
            f"{type(event).__name__} without a loader: requests with a prefill target came too early"
        )
