"""How a router ends: told, it leaves first and drains then, so that no client meets an error for it.

    leaving     for `shutdown_grace_s`, until whoever spreads the load has seen it: /ready says no, answers
                carry `Connection: close`, requests are taken all the same
    draining    at most for `drain_timeout_s`: new requests get 503, what runs finishes
    cut         what is left ends with an error that says so; the exit status is 0 all the same

SIGINT leaves out the first part: somebody waits at a terminal. While the router loads, and on a second
signal, the process ends at once.
"""

from __future__ import annotations

import asyncio
import os
import signal

import uvicorn

from core import log
from core.clock import monotonic
from core.errors import SOON_S, Unavailable
from services.router.router import Router
from services.router.sse import LAST_WORDS_S

LOOK_EVERY_S = 0.05

logger = log.get("router")


def end_on_signals(router: Router, server: uvicorn.Server) -> None:
    """Take SIGTERM and SIGINT from the running loop."""
    loop, shutdown = asyncio.get_running_loop(), _Shutdown(router, server)
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, shutdown.on_signal, number)


class _Shutdown:
    def __init__(self, router: Router, server: uvicorn.Server) -> None:
        self._router, self._server = router, server
        self._task: asyncio.Task[None] | None = None

    def on_signal(self, number: int) -> None:
        if self._router.text is None:
            os._exit(0)
        if self._task:
            os._exit(1)
        grace_s = self._router.settings.shutdown_grace_s if number == signal.SIGTERM else 0.0
        self._task = asyncio.create_task(self._run(grace_s))

    async def _run(self, grace_s: float) -> None:
        self._router.leaving = True
        logger.info("router.leaving", grace_s=grace_s)
        await asyncio.sleep(grace_s)
        self._router.draining = True
        deadline = monotonic() + self._router.settings.drain_timeout_s
        open_requests = self._server.server_state.tasks
        while open_requests and monotonic() < deadline:
            await asyncio.wait(open_requests, timeout=LOOK_EVERY_S)
        if open_requests:
            await self._cut(set(open_requests))
        self._server.should_exit = True

    @staticmethod
    async def _cut(open_requests: set[asyncio.Task[None]]) -> None:
        logger.warning("router.cut", requests=len(open_requests))
        for request in open_requests:
            request.cancel()
        await asyncio.wait(open_requests, timeout=LAST_WORDS_S)


def cut_off() -> Unavailable:
    """What a client is told whose request was cancelled here."""
    return Unavailable(
        "the router shut down before the answer was complete; send the request again", retry_after_s=SOON_S
    )
