"""The routes that change something: the role of a worker."""

from __future__ import annotations

import asyncio

import orjson
from fastapi import Request, Response

from core.errors import Conflict, NotFound, Unavailable
from core.request import Role
from services.router.cluster import describe
from services.router.fleet import Fleet
from services.router.parse import read_body
from services.router.roster import Member
from services.router.router import Router
from services.router.schemas import RoleBody
from services.router.standing import WorkerState

SEEN_WITHIN_S = 1.0
LOOK_EVERY_S = 0.02


class AdminRoutes:
    """Handlers of one router. All raise BatonError for what the gate answers with an envelope."""

    def __init__(self, router: Router) -> None:
        self._router = router
        self._one_at_a_time = asyncio.Lock()  # else two changes could take the last two decode workers

    async def change_role(self, id: str, request: Request) -> Response:
        """Let a worker finish what it does and take the other role. 202: it has begun, and `/v1/cluster`
        shows how it goes; 200: it has that role."""
        text, fleet = self._router.serving()
        limit_nbytes = self._router.settings.max_body_bytes
        body = await text.read(await read_body(request.scope, request.receive, limit_nbytes), RoleBody)
        async with self._one_at_a_time:
            member, state = _find(fleet, id)
            if member.role == body.role and state is not WorkerState.DRAINING:
                return self._answer(fleet, member, 200)
            _check(fleet, member, state, body.role)
            await fleet.change_role(member.address, body.role)
            await self._until_seen(fleet, member, body.role)
        return self._answer(fleet, member, 202)

    @staticmethod
    async def _until_seen(fleet: Fleet, member: Member, role: str) -> None:
        """Until nothing new is planned on it in its old role, at most a second."""
        for _ in range(round(SEEN_WITHIN_S / LOOK_EVERY_S)):
            if member.role == role or fleet.status(member)[0] is not WorkerState.READY:
                return
            await asyncio.sleep(LOOK_EVERY_S)

    @staticmethod
    def _answer(fleet: Fleet, member: Member, status: int) -> Response:
        described = describe(member, *fleet.status(member))
        return Response(orjson.dumps(described), status, media_type="application/json")


def _find(fleet: Fleet, name: str) -> tuple[Member, WorkerState]:
    """The worker of this id, or of this incarnation where ids are not unique. Raises NotFound, Conflict."""
    found = [
        (member, state)
        for member, state, _ in fleet.workers()
        if state is not WorkerState.DUPLICATE
        and name in (member.worker_id, member.hello.incarnation if member.hello else "")
    ]
    if not found:
        raise NotFound("there is no worker of that id; /v1/cluster lists them")
    if len(found) > 1:
        raise Conflict(f"{len(found)} workers have that id; name the one that is meant by its incarnation")
    return found[0]


def _check(fleet: Fleet, member: Member, state: WorkerState, role: str) -> None:
    """Raises Unavailable, or Conflict where nobody would be left to decode."""
    if state in (WorkerState.CONNECTING, WorkerState.LOST):
        raise Unavailable(f"worker {member.worker_id} is {state.value}; wait until it is back")
    assert member.hello is not None
    others = [each for each in fleet.view().decode if each.incarnation != member.hello.incarnation]
    if role == Role.PREFILL and member.role == Role.DECODE and not others:
        raise Conflict(
            f"{member.worker_id} is the last decode worker that is ready, and without one nothing is "
            f"answered; start another one first, or make a prefill worker one"
        )
