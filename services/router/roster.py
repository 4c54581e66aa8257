"""What the router knows of its workers: their events in, their states and the planner's view out.

    connecting    no Hello yet
    ready         takes requests
    draining      finishes what it has
    duplicate     the same worker as at an address that is used already
    incompatible  another model, tokenizer, block size ... than the fleet; `reason` names the field
    silent        connected, but its engine or its loop does not turn
    lost          was there, is gone; the connection is tried again

No I/O and no clock of its own: every call that depends on time is told the time. What is asked for each
request costs the same however many workers there are.
"""

from __future__ import annotations

import random
from collections.abc import Collection, Mapping, Sequence
from itertools import islice
from math import inf

from core.kv import Fingerprint
from core.request import Role
from planning.prefix_index import Changes, PrefixIndex
from planning.shortlist import Pool
from planning.worker_view import FleetView, Sent
from services.router.member import Member
from services.router.reference import Reference
from services.router.standing import Standings, WorkerState
from wire.v1 import worker_pb2 as pb

GUESSED_SEATS = 64
"""Of a worker that does not say how many sequences it runs at once."""

MAX_HOLDERS = 4
"""Workers of each role that are looked at because they hold a part of the prompt."""

MAX_ODD = 8
"""Incompatible prefill workers that the planner is shown where no other one is ready."""


class Roster:
    """All discovered workers. `tokenizer_digest` is the router's own: ids made here must mean the
    same there. `silence_s`: a worker that says or does nothing for longer is not used."""

    def __init__(self, tokenizer_digest: str, silence_s: float, rng: random.Random | None = None) -> None:
        self._silence_s = silence_s
        self._rng = rng or random.Random()
        self.members: dict[str, Member] = {}
        self.index = PrefixIndex()
        self._reference = Reference(tokenizer_digest)
        self._standings = Standings()
        self._pools = {role: Pool(self._rng) for role in Role}
        """The connected workers of each role, by address."""
        self._places: dict[str, list[str]] = {}
        """By incarnation, where it is connected. It is used, and counts, at the first of them only: a name
        that has an IPv4 and an IPv6 address does not make two workers of one."""

    @property
    def reference(self) -> Fingerprint | None:
        """See `Reference.fingerprint`."""
        return self._reference.fingerprint

    def add(self, address: str) -> None:
        """An address was discovered."""
        self.members[address] = Member(address)
        self._standings.put(address, "", WorkerState.CONNECTING)

    def remove(self, address: str) -> None:
        """An address is no longer discovered."""
        self._leave(self.members[address])
        self._standings.leave(address)
        del self.members[address]

    def hello(self, address: str, hello: pb.Hello, now: float) -> None:
        """A stream began, or the worker changed its role. News of its blocks begins with all of them."""
        member = self.members[address]
        before = member.hello.incarnation if member.connected and member.hello else None
        if before != hello.incarnation:
            self._leave(member)
            self._places.setdefault(hello.incarnation, []).append(address)
        member.greeted(hello, now)
        self._standings.heard(address, now)
        if member.fingerprint == self.reference:
            member.fingerprint = self.reference  # one object, quickly compared
        self._judge(member)

    def state(self, address: str, state: pb.State, now: float) -> None:
        member = self.members[address]
        member.heard(state, now)
        self._standings.heard(address, now)
        self._list(member)

    def session(self, address: str, is_open: bool) -> None:
        """Whether a decode worker can be sent anything now. An address that was removed is left alone."""
        if member := self.members.get(address):
            member.has_session = is_open
            self._list(member)

    def kv(self, address: str, events: pb.KvEvents) -> bool:
        """Take over what the worker says of its blocks; False when something before it was missed."""
        changes = [Changes(tier.tier, tier.stored, tier.evicted) for tier in events.tiers]
        return self.index.apply(address, events.first, events.next, events.snapshot, changes)

    def assigned(self, request_id: str, work: Mapping[str, Sent]) -> None:
        """So much of a request was sent to each of these workers, by incarnation; States will count it."""
        sent = [(self.at(incarnation), each) for incarnation, each in work.items()]
        for role, pool in self._pools.items():
            chosen = {m.address: (m, each) for m, each in sent if m is not None and m.role == role}
            if chosen:
                pool.sent({address: each.sequences for address, (_, each) in chosen.items()})
            for member, each in chosen.values():
                member.sent(request_id, each)
                self._list(member)

    def ended(self, request_id: str, work: Mapping[str, Sent]) -> None:
        """So much of what each of these workers was sent is over."""
        for incarnation, each in work.items():
            member = self.at(incarnation)
            if member is not None:
                member.ended(request_id, each)
                self._list(member)

    def answered(self, incarnation: str, way_s: float) -> None:
        """See `Member.answered`."""
        member = self.at(incarnation)
        if member is not None:
            member.answered(way_s)

    def lost(self, address: str, reason: str) -> bool:
        """The stream ended. Returns whether there was one, i.e. whether something was lost."""
        member = self.members[address]
        was_connected = member.connected
        self._leave(member)
        member.lost_reason = reason
        return was_connected

    def at(self, incarnation: str) -> Member | None:
        """The connected worker of this incarnation, at the address where it is used."""
        places = self._places.get(incarnation)
        return self.members[places[0]] if places else None

    def status(self, member: Member, now: float) -> tuple[WorkerState, str]:
        """The state of a worker, and the reason when it is not ready."""
        if member.hello is None:
            return WorkerState.CONNECTING, member.lost_reason
        if not member.connected:
            return WorkerState.LOST, member.lost_reason
        if member.mismatch:
            return WorkerState.INCOMPATIBLE, member.mismatch
        if member.state is None:
            return WorkerState.CONNECTING, "no State yet"
        silence = self._silence(member, member.state, now)
        if silence:
            return WorkerState.SILENT, silence
        if not self._used(member):
            return WorkerState.DUPLICATE, f"it is used at {self._places[member.hello.incarnation][0]}"
        if member.state.phase != "ready":
            return WorkerState.DRAINING, f"its phase is {member.state.phase}"
        return WorkerState.READY, ""

    def changes(self, now: float) -> list[str]:
        """Addresses whose worker is in another state, or role, than when this was last asked."""
        self._look(now)
        return self._standings.changes()

    def counts(self, now: float) -> Mapping[tuple[str, WorkerState], int]:
        """Workers by role, "" where none was told yet, and state; an address of one is one."""
        self._look(now)
        return self._standings.counts

    def amiss(self, now: float) -> Collection[str]:
        """Addresses of workers that are neither ready nor duplicates, the longest so first."""
        self._look(now)
        return self._standings.amiss.keys()

    def fleet_view(
        self,
        now: float,
        keys: Sequence[int] = (),
        num_tokens: int = 0,
        num_prefill_tokens: int = 0,
        without: Collection[str] = (),
    ) -> FleetView:
        """Workers that take requests now, and what they hold of a prompt with these blocks
        (`core.blocks.block_key`): all of few, of many those that are worth a look.

        `num_tokens`, `num_prefill_tokens`: that a decode worker, and a prefill worker, has to hold.
        `without`: incarnations to leave out. Where no prefill worker is ready, those whose fingerprint
        differs are in it: the planner names them as the reason why nothing is handed off.
        """
        out = {member.address for each in without if (member := self.at(each)) is not None}
        holders = self._holders(keys)
        needs = {Role.DECODE: num_tokens, Role.PREFILL: num_prefill_tokens}
        since = now - self._silence_s
        picked = {
            role: [self.members[name] for name in pool.pick(since, needs[role], holders[role], out)]
            for role, pool in self._pools.items()
        }
        decode, prefill = picked[Role.DECODE], picked[Role.PREFILL] or self._odd()
        found, recent = {}, {}
        for member in (*decode, *prefill):
            incarnation = member.view().incarnation
            recent[incarnation] = self._pools[Role(member.role)].recent(member.address)
            if keys and (held := self.index.leading(member.address, keys)):
                found[incarnation] = held
        return FleetView(
            tuple(member.view() for member in decode),
            tuple(member.view() for member in prefill),
            found,
            recent,
            now,
        )

    def seats(self, now: float) -> tuple[int, int]:
        """Of the decode workers that take requests now: sequences that they run at once, and those that they
        have or are about to have."""
        return self._pools[Role.DECODE].seats(now - self._silence_s)

    def _holders(self, keys: Sequence[int]) -> dict[Role, list[str]]:
        holders: dict[Role, list[str]] = {role: [] for role in Role}
        for name in self.index.holders(keys, MAX_HOLDERS, self._rng) if keys else ():
            for role, pool in self._pools.items():
                if name in pool and len(holders[role]) < MAX_HOLDERS:
                    holders[role].append(name)
            if all(len(names) == MAX_HOLDERS for names in holders.values()):
                break
        return holders

    def _odd(self) -> list[Member]:
        members = (self.members[name] for name in self._pools[Role.PREFILL])
        return list(islice((member for member in members if member.mismatch), MAX_ODD))

    def _look(self, now: float) -> None:
        """Silence is no event."""
        for address in self._standings.unheard(now - self._silence_s):
            self._list(self.members[address])

    def _leave(self, member: Member) -> None:
        """Its life at its address is over, or another one's begins there. Idempotent."""
        member.left()
        self.index.forget(member.address)
        if member.hello is None:
            return
        places = self._places.get(member.hello.incarnation, [])
        if member.address in places:
            places.remove(member.address)
            if not places:
                del self._places[member.hello.incarnation]
        self._judge(member)
        if places:
            self._judge(self.members[places[0]])

    def _used(self, member: Member) -> bool:
        """Connected, and not a further address of a worker that is."""
        if not member.connected or member.hello is None:
            return False
        return self._places[member.hello.incarnation][0] == member.address

    def _judge(self, member: Member) -> None:
        """After every change of who it is, or whether it is used."""
        reference = self._reference
        fits = self._used(member) and member.role == Role.DECODE and member.fingerprint is not None
        vote = member.fingerprint if fits else None
        if vote is not None and not reference.may_vote(vote):
            vote = None
        before, member.vote = member.vote, vote
        votes = (each.vote for each in self.members.values())
        if before != vote and reference.count(before, vote, votes):
            for each in self.members.values():
                each.mismatch = reference.mismatch(each.fingerprint)
                self._list(each)
        else:
            member.mismatch = reference.mismatch(member.fingerprint)
            self._list(member)

    def _list(self, member: Member) -> None:
        """Its standing, and its row in the pool of its role, are up to date."""
        now = member.heard_at if self._standings.hears(member.address) else inf
        state = self.status(member, now)[0]
        self._standings.put(member.address, member.role, state)
        usable = state is WorkerState.READY and (member.has_session or member.role != Role.DECODE)
        for role, pool in self._pools.items():
            if not self._used(member) or member.role != role:
                pool.leave(member.address)
                continue
            assert member.hello is not None
            if member.address not in pool:
                pool.join(member.address, member.view().max_tokens)
            seats = member.hello.max_num_seqs or GUESSED_SEATS
            pool.update(member.address, member.busy_s, member.heard_at, usable, seats, member.load)

    def _silence(self, member: Member, state: pb.State, now: float) -> str:
        unheard = now - member.heard_at
        if unheard > self._silence_s:
            return f"no State for {unheard:.0f} s"
        if state.idle_s > self._silence_s:  # the loop turns twice a second, also without work
            return f"its engine has not moved for {state.idle_s:.0f} s"
        return ""
