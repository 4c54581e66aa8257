"""Carries engine events from the engine's thread to whoever waits for them on the event loop."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable

from core import log
from core.errors import EngineFault
from core.request import TokenDelta
from engine.messages import BlocksBuilt, Event, Failed, LoadCancelled, LoadOrdered

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
        self.abort: Callable[[str], None] = lambda _: None
        self.num_faults = 0

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
                handler = self._handlers.get(_owner(event))
            if handler is None:
                continue  # its owner has left; the abort is on its way
            try:
                handler(event)
            except Exception as error:
                self._broke(event, handler, error)

    def _broke(self, event: Event, handler: Handler, error: Exception) -> None:
        """An event was lost: its request cannot go on rightly, so it ends with an error."""
        self.num_faults += 1
        _log.error("hub.handler_failed", event_kind=type(event).__name__, exc_info=error)
        if isinstance(event, (LoadOrdered, LoadCancelled)):
            return
        owner = _owner(event)
        self.abort(owner)
        fault = EngineFault(f"the worker could not pass an answer on ({type(error).__name__}); try again")
        with contextlib.suppress(Exception):  # it is counted and aborted already
            handler(Failed(owner, fault))

    @staticmethod
    def _no_loader(event: Event) -> None:
        raise AssertionError(
            f"{type(event).__name__} without a loader: requests with a prefill target came too early"
        )


def _owner(event: TokenDelta | BlocksBuilt | Failed) -> str:
    return event.job_id if isinstance(event, BlocksBuilt) else event.request_id
