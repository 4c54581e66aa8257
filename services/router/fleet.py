"""The router's connections: a `Watch` stream to every discovered worker, a session to decode workers.

The Watch stream is the truth about a worker; what it means is decided in `roster`. A connection
that ends is tried again after at most a second, for as long as the address is discovered.

Discovery says where to look, not who lives: a worker that is no longer discovered, as those that drain
and all of them while a name server or a Redis starts anew, is followed until its stream ends.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import chain, islice

import grpc

from core import log
from core.clock import AwakeClock, Clock, monotonic
from core.errors import BatonError, Unavailable
from core.request import Role
from planning.plan import Plan
from planning.worker_view import FleetView
from services.discovery import Discovery
from services.router.bugs import reported
from services.router.placed import Placed
from services.router.roster import Member, Roster
from services.router.session import Session
from services.router.standing import WorkerState
from wire import channel, status
from wire.v1 import worker_pb2 as pb
from wire.v1 import worker_pb2_grpc as pb_grpc

HELLO_TIMEOUT_S = 10.0
FIRST_RETRY_S, LONGEST_RETRY_S = 0.05, 1.0
TICK_S = 0.5
SET_ROLE_TIMEOUT_S = 5.0

logger = log.get("router.fleet")


def pause_after(lasted_s: float, pause_s: float) -> float:
    """Seconds until a stream that has lasted so long is opened again, `pause_s` those before it was."""
    return FIRST_RETRY_S if lasted_s > LONGEST_RETRY_S else min(2 * pause_s, LONGEST_RETRY_S)


@dataclass(slots=True)
class _Link:
    """What belongs to one address. `decoding` is set while a worker in that role answers and is used here: a
    session is then opened, and opened again. One that is open goes on when that ends, for the requests that
    it has. `incarnation` is the worker's own that was there last."""

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
        identity: channel.Identity = channel.OPEN,
    ) -> None:
        self.roster = Roster(tokenizer_digest, silence_s)
        self.connections_lost: Counter[str] = Counter(dict.fromkeys(Role, 0))
        self._discovery = discovery
        self._count_fault = count_fault
        self._clock = AwakeClock(TICK_S, clock)  # a worker is silent only while we listen
        self._identity = identity
        self._links: dict[str, _Link] = {}
        self._discovered: frozenset[str] = frozenset()
        self._closing: set[asyncio.Task[None]] = set()  # channels of addresses that were dropped

    async def run(self) -> None:
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self._discover(group))
                group.create_task(self._tick())
        finally:
            await asyncio.gather(*(link.channel.close() for link in self._links.values()), *self._closing)

    def view(
        self,
        keys: Sequence[int] = (),
        num_tokens: int = 0,
        num_prefill_tokens: int = 0,
        without: Collection[str] = (),
    ) -> FleetView:
        """Workers that take requests now: ready, and decode workers with an open session. See
        `Roster.fleet_view`."""
        return self.roster.fleet_view(self._clock(), keys, num_tokens, num_prefill_tokens, without)

    def seats(self) -> tuple[int, int]:
        """See `Roster.seats`."""
        return self.roster.seats(self._clock())

    def workers(self) -> list[tuple[Member, WorkerState, str]]:
        """Every worker with its state and the reason when it is not ready."""
        now = self._clock()
        return [(member, *self.roster.status(member, now)) for member in self.roster.members.values()]

    def some(self, at_most: int) -> list[tuple[Member, WorkerState, str]]:
        """So many of them, those with which something is amiss first."""
        amiss, members = self.roster.amiss(self._clock()), self.roster.members
        others = (address for address in members if address not in amiss)
        shown = [members[address] for address in islice(chain(amiss, others), at_most)]
        return [(member, *self.status(member)) for member in shown]

    def num_amiss(self) -> int:
        """Workers that are neither ready nor duplicates."""
        return len(self.roster.amiss(self._clock()))

    def counts(self) -> Mapping[tuple[str, WorkerState], int]:
        """See `Roster.counts`."""
        return self.roster.counts(self._clock())

    def status(self, member: Member) -> tuple[WorkerState, str]:
        """The worker's state, and the reason when it is not ready."""
        return self.roster.status(member, self._clock())

    async def change_role(self, address: str, role: str) -> None:
        """Ask the worker there to change. Raises Unavailable when it is leaving or does not answer."""
        stub = pb_grpc.WorkerStub(self._links[address].channel)
        try:
            await stub.SetRole(pb.SetRoleRequest(role=role), timeout=SET_ROLE_TIMEOUT_S)
        except grpc.aio.AioRpcError as error:
            known = status.from_rpc(error, address)
            raise known if isinstance(known, Unavailable) else Unavailable(str(known)) from None

    def works(self, incarnation: str) -> bool:
        """Whether this life of a worker answers and moves, whether it takes requests or not."""
        member = self.roster.at(incarnation)
        return member is not None and self.status(member)[0] in (WorkerState.READY, WorkerState.DRAINING)

    def expects_decode(self) -> bool:
        """Whether decode workers are known that may come, or come back."""
        gone, counts = (WorkerState.CONNECTING, WorkerState.LOST, WorkerState.SILENT), self.counts()
        return any(counts.get((role, state)) for role in ("", Role.DECODE) for state in gone)

    def session(self, incarnation: str) -> Session | None:
        """The open session of a decode worker."""
        member = self.roster.at(incarnation)
        link = self._links.get(member.address) if member is not None else None
        return link.session if link is not None and link.session.up else None

    def place(self, request_id: str, plan: Plan, num_choices: int) -> Placed:
        """A request was just sent to a plan's workers: it counts there until the one that is returned is told
        that it is over."""
        return Placed(self.roster, request_id, plan, num_choices, self._clock)

    async def _discover(self, group: asyncio.TaskGroup) -> None:
        async for addresses in self._discovery.watch(self._count_fault):
            self._discovered = addresses
            for address in sorted(self._links.keys() - addresses):
                if not self.roster.members[address].connected:
                    self._drop(address)
            for address in sorted(addresses - self._links.keys()):
                self.roster.add(address)
                tell = partial(self.roster.session, address)
                tell(False)
                connection = channel.connect(address, self._identity)
                link = self._links[address] = _Link(
                    connection, Session(address, connection, self._count_fault, tell)
                )
                link.tasks = [
                    group.create_task(self._follow(address, link)),
                    group.create_task(link.session.run(link.decoding)),
                ]

    def _drop(self, address: str) -> None:
        """Forget an address, also from within the task that follows it."""
        link = self._links.pop(address)
        logger.info("worker.forgotten", worker=self.roster.members[address].worker_id, address=address)
        self.roster.remove(address)
        for task in link.tasks:
            if task is not asyncio.current_task():
                task.cancel()
        closing = asyncio.create_task(link.channel.close())
        self._closing.add(closing)
        closing.add_done_callback(self._closing.discard)

    async def _follow(self, address: str, link: _Link) -> None:
        retry_s = FIRST_RETRY_S
        while True:
            began = self._clock()
            reason = await self._watch(address, link)
            retry_s = pause_after(self._clock() - began, retry_s)
            if reason is not None:
                if self.roster.lost(address, reason):
                    self.connections_lost[self.roster.members[address].role] += 1
                self._settle()
                if address not in self._discovered:
                    self._drop(address)
                    return
            await asyncio.sleep(retry_s)

    async def _watch(self, address: str, link: _Link) -> str | None:
        """One Watch stream, to its end: why it ended, None where only news of blocks was missed: the worker
        is there, and a new stream begins with all of its blocks."""
        call = pb_grpc.WorkerStub(link.channel).Watch(pb.WatchRequest())
        try:
            events = aiter(call)
            async with asyncio.timeout(HELLO_TIMEOUT_S):
                event = await anext(events, pb.WatchEvent())
            if event.WhichOneof("kind") != "hello":
                return "the first message was not a Hello; is this a Baton worker?"
            self._greet(address, link, event.hello)
            async for event in events:
                if not self._heard(address, link, event):
                    return None
            return "the worker ended the stream"
        except TimeoutError:
            return f"no Hello within {HELLO_TIMEOUT_S:g} s"
        except grpc.aio.AioRpcError as error:
            return str(status.from_rpc(error, address))
        except BatonError as error:
            return error.message
        except Exception as error:
            self._count_fault("watch")
            return reported(error).message
        finally:
            call.cancel()

    def _heard(self, address: str, link: _Link, event: pb.WatchEvent) -> bool:
        """Take over what a worker says after its first Hello; False when news of its blocks was missed."""
        match event.WhichOneof("kind"):
            case "hello":  # another role
                self._greet(address, link, event.hello)
                self._settle()
            case "state":
                self.roster.state(address, event.state, self._clock())
                self._settle()
            case "kv" if not self.roster.kv(address, event.kv):
                logger.warning("worker.news_missed", address=address, incarnation=link.incarnation)
                return False
        return True

    def _greet(self, address: str, link: _Link, hello: pb.Hello) -> None:
        if hello.role not in (Role.PREFILL, Role.DECODE):
            raise Unavailable("its role is neither prefill nor decode; is this worker's version another?")
        self.roster.hello(address, hello, self._clock())
        link.incarnation, link.session.worker_id = hello.incarnation, hello.worker_id

    async def _tick(self) -> None:
        """Silence is no event: look for it."""
        while True:
            await asyncio.sleep(TICK_S)
            self._settle()

    def _settle(self) -> None:
        """Act on what workers have become: open sessions to those that decode, log it, take the requests away
        from those that fell silent."""
        for address in self.roster.changes(self._clock()):
            link, member = self._links[address], self.roster.members[address]
            state, reason = self.status(member)
            if member.role == Role.DECODE and state in (WorkerState.READY, WorkerState.DRAINING):
                link.decoding.set()
            else:
                link.decoding.clear()
            if state is link.reported:
                continue  # it is its role that changed
            link.reported = state
            line = logger.info if state in (WorkerState.READY, WorkerState.DUPLICATE) else logger.warning
            line(f"worker.{state.value}", worker=member.worker_id, address=address, reason=reason)
            if state is WorkerState.SILENT:
                link.session.abandon(f"decode worker {member.worker_id} does not answer: {reason}")
