"""The router's connections: a `Watch` stream to every discovered worker, a session to decode workers.

The Watch stream is the truth about a worker; what it means is decided in `roster`. A connection
that ends is tried again after at most a second, for as long as the address is discovered.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import grpc

from core import log
from core.clock import Clock, monotonic
from core.request import Role
from planning.plan import FleetView, Plan
from services.discovery import Discovery
from services.router.bugs import reported
from services.router.roster import Member, Roster, WorkerState
from services.router.session import Session
from wire import channel, status
from wire.v1 import worker_pb2 as pb
from wire.v1 import worker_pb2_grpc as pb_grpc

HELLO_TIMEOUT_S = 10.0
FIRST_RETRY_S, LONGEST_RETRY_S = 0.05, 1.0
TICK_S = 0.5

logger = log.get("router.fleet")


@dataclass(slots=True)
class _Link:
    """What belongs to one address. `decoding` is set while a decode worker's Watch stream lives;
    `incarnation` is the worker's own that was there last."""

    channel: grpc.aio.Channel
    session: Session
    incarnation: str = ""
    decoding: asyncio.Event = field(default_factory=asyncio.Event)
    tasks: list[asyncio.Task[None]] = field(default_factory=list)
    reported: WorkerState = WorkerState.CONNECTING


class Fleet:
    """All workers. `run` serves until it is cancelled; the rest may be called any time meanwhile.

    Here a worker is its incarnation: ids are for people, and two workers may have been given the same.
    `count_fault` is told of streams that ended for a reason which nobody foresaw.
    """

    def __init__(
        self,
        discovery: Discovery,
        tokenizer_digest: str,
        silence_s: float,
        count_fault: Callable[[str], None],
        clock: Clock = monotonic,
    ) -> None:
        self.roster = Roster(tokenizer_digest, silence_s)
        self.connections_lost: Counter[str] = Counter(dict.fromkeys(Role, 0))
        self._discovery = discovery
        self._count_fault = count_fault
        self._clock = clock
        self._links: dict[str, _Link] = {}

    async def run(self) -> None:
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self._discover(group))
                group.create_task(self._tick())
        finally:
            await asyncio.gather(*(link.channel.close() for link in self._links.values()))

    def view(self) -> FleetView:
        """The workers that take requests now: ready, and decode workers with an open session."""
        view = self.roster.fleet_view(self._clock())
        up = {link.incarnation for link in self._links.values() if link.session.up}
        return replace(view, decode=tuple(w for w in view.decode if w.incarnation in up))

    def workers(self) -> list[tuple[Member, WorkerState, str]]:
        """Every worker with its state and the reason when it is not ready."""
        now = self._clock()
        return [(member, *self.roster.status(member, now)) for member in self.roster.members.values()]

    def session(self, incarnation: str) -> Session | None:
        """The open session of a decode worker."""
        links = (link for link in self._links.values() if link.incarnation == incarnation)
        return next((link.session for link in links if link.session.up), None)

    def assigned(self, plan: Plan, sequences: int) -> None:
        """Count a request just sent to a plan's workers, until their next State counts it."""
        self.roster.assigned([worker.incarnation for worker in plan.workers], sequences)

    async def _discover(self, group: asyncio.TaskGroup) -> None:
        async for addresses in self._discovery.watch():
            for address in sorted(self._links.keys() - addresses):
                await self._drop(address)
            for address in sorted(addresses - self._links.keys()):
                self.roster.add(address)
                connection = channel.connect(address)
                link = self._links[address] = _Link(
                    connection, Session(address, connection, self._count_fault)
                )
                link.tasks = [
                    group.create_task(self._follow(address, link)),
                    group.create_task(link.session.run(link.decoding)),
                ]

    async def _drop(self, address: str) -> None:
        link = self._links.pop(address)
        for task in link.tasks:
            task.cancel()
        await asyncio.gather(*link.tasks, return_exceptions=True)
        self.roster.remove(address)
        await link.channel.close()

    async def _follow(self, address: str, link: _Link) -> None:
        retry_s = FIRST_RETRY_S
        while True:
            reason = await self._watch(address, link)
            if reason is not None:
                link.decoding.clear()
                if self.roster.lost(address, reason):
                    retry_s = FIRST_RETRY_S
                    self.connections_lost[self.roster.members[address].role] += 1
                self._report(address, link)
            await asyncio.sleep(retry_s)
            retry_s = min(2 * retry_s, LONGEST_RETRY_S)

    async def _watch(self, address: str, link: _Link) -> str | None:
        """One Watch stream, to its end; returns why it ended, None where only news of blocks was missed:
        the worker is there, and a new stream begins with all of its blocks."""
        call = pb_grpc.WorkerStub(link.channel).Watch(pb.WatchRequest())
        try:
            events = aiter(call)
            async with asyncio.timeout(HELLO_TIMEOUT_S):
                event = await anext(events, pb.WatchEvent())
            if event.WhichOneof("kind") != "hello":
                return "the first message was not a Hello; is this a Baton worker?"
            if event.hello.role not in (Role.PREFILL, Role.DECODE):
                return "its role is neither prefill nor decode; is this worker's version another?"
            self._greet(address, link, event.hello)
            async for event in events:
                if event.WhichOneof("kind") == "state":
                    self.roster.state(address, event.state, self._clock())
                    self._report(address, link)
                elif event.WhichOneof("kind") == "kv" and not self.roster.kv(address, event.kv):
                    logger.warning("worker.news_missed", address=address, incarnation=link.incarnation)
                    return None
            return "the worker ended the stream"
        except TimeoutError:
            return f"no Hello within {HELLO_TIMEOUT_S:g} s"
        except grpc.aio.AioRpcError as error:
            return str(status.from_rpc(error, address))
        except Exception as error:
            self._count_fault("watch")
            return reported(error).message
        finally:
            call.cancel()

    def _greet(self, address: str, link: _Link, hello: pb.Hello) -> None:
        self.roster.hello(address, hello, self._clock())
        link.incarnation, link.session.worker_id = hello.incarnation, hello.worker_id
        if hello.role == Role.DECODE:
            link.decoding.set()

    async def _tick(self) -> None:
        """Silence is no event: look for it."""
        while True:
            await asyncio.sleep(TICK_S)
            for address, link in self._links.items():
                self._report(address, link)

    def _report(self, address: str, link: _Link) -> None:
        """Log a change of state; take the requests away from a worker that fell silent."""
        member = self.roster.members[address]
        state, reason = self.roster.status(member, self._clock())
        if state is link.reported:
            return
        link.reported = state
        line = logger.info if state is WorkerState.READY else logger.warning
        line(f"worker.{state.value}", worker=member.worker_id, address=address, reason=reason)
        if state is WorkerState.SILENT:
            link.session.abandon(f"decode worker {member.worker_id} does not answer: {reason}")
