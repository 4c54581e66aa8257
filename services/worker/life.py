"""How a worker stops taking work: for another role, or for good.

    ready --> draining, and takes what routers send that have not heard of it (`shutdown_grace_s`)
          --> draining, and takes nothing; what runs finishes, at most for `drain_timeout_s`
          --> ready in the other role, or gone

Every worker does both roles' work, so a change of role cuts nothing: what still runs at the bound goes on.
"""

from __future__ import annotations

import asyncio

from core import log
from core.clock import monotonic
from core.errors import InvalidParameter, Unavailable
from core.request import Role
from services.worker.host import WorkerHost

LOOK_EVERY_S = 0.05

_log = log.get("worker")


class Life:
    """One worker's; belongs to its event loop."""

    def __init__(self, host: WorkerHost) -> None:
        self._host = host
        self._change: asyncio.Task[None] | None = None
        self._wanted = ""
        self._leaving = False

    def change_role(self, role: str) -> None:
        """Begin to change; the role that the worker has ends a change to the other.

        Raises InvalidParameter, or Unavailable once the worker is leaving.
        """
        if role not in (Role.PREFILL, Role.DECODE):
            raise InvalidParameter("role: a worker's role is prefill or decode", param="role")
        if self._leaving:
            raise Unavailable(f"worker {self._host.worker_id} is stopping; its role does not change any more")
        if self._change and role == self._wanted:
            return
        self._give_up_change()
        if role == self._host.role:
            self._host.ready(role)
            return
        self._wanted = role
        self._change = asyncio.create_task(self._become(role))

    async def leave(self, grace_s: float) -> int:
        """Finish what runs, after `grace_s` of taking new work; returns how much of it is left."""
        self._leaving = True
        self._give_up_change()
        return await self._drain(grace_s)

    async def _become(self, role: str) -> None:
        _log.info("worker.changing_role", role=role)
        left = await self._drain(self._host.settings.shutdown_grace_s)
        self._change = None
        self._host.ready(role)
        _log.info("worker.role_changed", role=role, still_running=left)

    def _give_up_change(self) -> None:
        if self._change:
            self._change.cancel()
            self._change = None

    async def _drain(self, grace_s: float) -> int:
        host = self._host
        if grace_s > 0:
            host.draining(takes_work=True)
            await asyncio.sleep(grace_s)
        host.draining(takes_work=False)
        deadline = monotonic() + host.settings.drain_timeout_s
        while True:
            left = work_left(host)
            if left == 0 or monotonic() >= deadline or host.built.failed:
                return left
            await asyncio.sleep(LOOK_EVERY_S)


def work_left(host: WorkerHost) -> int:
    """Requests and prefill jobs that are not over, those counted that the engine has not heard of yet."""
    s = host.built.loop.stats
    return max(s.running + s.waiting + s.loading + s.held, host.hub.num_registered)
