"""What the router knows of its workers: their events in, their states and the planner's view out.

    connecting    no Hello yet
    ready         takes requests
    draining      finishes what it has
    incompatible  another model, tokenizer, block size ... than the fleet; `reason` names the field
    silent        connected, but its engine or its loop does not turn
    lost          was there, is gone; the connection is tried again

No I/O and no clock of its own: every call that depends on time is told the time.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from core.kv import Fingerprint
from core.request import Role
from planning.balance import credit_tokens, fade
from planning.plan import FleetView, WorkerView
from planning.prefix_index import Changes, PrefixIndex
from wire import codec
from wire.v1 import worker_pb2 as pb


class WorkerState(StrEnum):
    CONNECTING = "connecting"
    READY = "ready"
    DRAINING = "draining"
    INCOMPATIBLE = "incompatible"
    SILENT = "silent"
    LOST = "lost"


@dataclass(slots=True)
class Member:
    """One discovered address. `unseen`: sequences sent to it since its last State. `recent`: those sent to it
    lately, over or not; it fades, see `planning.balance`."""

    address: str
    hello: pb.Hello | None = None
    fingerprint: Fingerprint | None = None
    state: pb.State | None = None
    connected: bool = False
    heard_at: float = 0.0
    lost_reason: str = ""
    unseen: int = 0
    recent: float = 0.0
    index: PrefixIndex = field(default_factory=PrefixIndex)

    @property
    def worker_id(self) -> str:
        return self.hello.worker_id if self.hello else self.address

    @property
    def role(self) -> str:
        return self.hello.role if self.hello else ""

    @property
    def load(self) -> int:
        """Sequences it has or is about to have."""
        s = self.state
        return self.unseen + (s.running + s.waiting + s.loading + s.held if s else 0)

    def view(self) -> WorkerView:
        assert self.hello is not None
        assert self.fingerprint is not None
        return WorkerView(
            worker_id=self.hello.worker_id,
            address=self.hello.address or self.address,
            incarnation=self.hello.incarnation,
            fingerprint=self.fingerprint,
            total_blocks=self.hello.total_blocks,
            load=self.load,
            recent=self.recent,
            token_s=self.state.prefill_token_s if self.state else 0.0,
        )

    def credit_tokens(self, keys: Sequence[int]) -> float:
        """What it need not compute of a prompt whose full blocks have these `core.blocks.block_key`s."""
        if self.state is None or self.fingerprint is None:
            return 0.0
        token_s = {tier.tier: tier.token_s for tier in self.state.tiers}
        found = self.index.leading(keys)
        return credit_tokens(found, self.fingerprint.block_size, token_s, self.state.prefill_token_s)


class Roster:
    """All discovered workers. `tokenizer_digest` is the router's own: ids made here must mean the
    same there. `silence_s`: a worker that says or does nothing for longer is not used."""

    def __init__(self, tokenizer_digest: str, silence_s: float) -> None:
        self._tokenizer_digest = tokenizer_digest
        self._silence_s = silence_s
        self.members: dict[str, Member] = {}
        self.reference: Fingerprint | None = None
        """What most connected decode workers have (of equals, the one discovered first)."""

    def add(self, address: str) -> None:
        """An address was discovered."""
        self.members[address] = Member(address)

    def remove(self, address: str) -> None:
        """An address is no longer discovered."""
        del self.members[address]
        self._vote()

    def hello(self, address: str, hello: pb.Hello, now: float) -> None:
        member = self.members[address]
        if member.connected and member.hello and member.hello.incarnation == hello.incarnation:
            member.index, member.heard_at = PrefixIndex(), now  # only its blocks are told anew
            return
        member.hello, member.state = hello, None
        member.fingerprint = codec.fingerprint_from_wire(hello.fingerprint)
        member.connected, member.heard_at, member.unseen = True, now, 0
        member.index = PrefixIndex()
        self._vote()
        others = [each.recent for each in self._pool(member.role) if each is not member]
        member.recent = min(others, default=0.0)  # else a new worker would get all until it has caught up

    def state(self, address: str, state: pb.State, now: float) -> None:
        member = self.members[address]
        member.state, member.heard_at, member.unseen = state, now, 0

    def kv(self, address: str, events: pb.KvEvents) -> bool:
        """Take over what the worker says of its blocks; False when something before it was missed."""
        changes = [Changes(tier.tier, tier.stored, tier.evicted) for tier in events.tiers]
        return self.members[address].index.apply(events.first, events.next, events.snapshot, changes)

    def assigned(self, incarnations: Collection[str], sequences: int) -> None:
        """A request was sent to these workers; their next State counts it in their load."""
        for role in Role:
            pool = self._pool(role)
            chosen = [m for m in pool if m.hello is not None and m.hello.incarnation in incarnations]
            for member in pool if chosen else ():
                member.recent *= fade(len(pool)) ** sequences
            for member in chosen:
                member.unseen += sequences
                member.recent += sequences

    def credits(self, keys: Sequence[int]) -> dict[str, float]:
        """By incarnation, what each worker need not compute of a prompt with these blocks."""
        return {
            member.hello.incarnation: member.credit_tokens(keys)
            for member in self.members.values()
            if member.connected and member.hello is not None
        }

    def _pool(self, role: str) -> list[Member]:
        return [member for member in self.members.values() if member.connected and member.role == role]

    def lost(self, address: str, reason: str) -> bool:
        """The stream ended. Returns whether there was one, i.e. whether something was lost."""
        member = self.members[address]
        was_connected, member.connected = member.connected, False
        member.lost_reason, member.unseen = reason, 0
        self._vote()
        return was_connected

    def status(self, member: Member, now: float) -> tuple[WorkerState, str]:
        """The state of a worker, and the reason when it is not ready."""
        if member.hello is None:
            return WorkerState.CONNECTING, member.lost_reason
        if not member.connected:
            return WorkerState.LOST, member.lost_reason
        mismatch = self._mismatch(member)
        if mismatch:
            return WorkerState.INCOMPATIBLE, mismatch
        if member.state is None:
            return WorkerState.CONNECTING, "no State yet"
        silence = self._silence(member, member.state, now)
        if silence:
            return WorkerState.SILENT, silence
        if member.state.phase != "ready":
            return WorkerState.DRAINING, f"its phase is {member.state.phase}"
        return WorkerState.READY, ""

    def fleet_view(self, now: float) -> FleetView:
        """The workers that take requests now. Prefill workers whose fingerprint differs are in it: the
        planner names them as the reason why nothing is handed off."""
        decode, prefill = [], []
        for member in self.members.values():
            state, _ = self.status(member, now)
            if member.role == Role.DECODE and state is WorkerState.READY:
                decode.append(member.view())
            elif member.role == Role.PREFILL and state in (WorkerState.READY, WorkerState.INCOMPATIBLE):
                prefill.append(member.view())
        return FleetView(tuple(decode), tuple(prefill))

    def _silence(self, member: Member, state: pb.State, now: float) -> str:
        unheard = now - member.heard_at
        if unheard > self._silence_s:
            return f"no State for {unheard:.0f} s"
        if state.idle_s > self._silence_s:  # the loop turns twice a second, also without work
            return f"its engine has not moved for {state.idle_s:.0f} s"
        return ""

    def _mismatch(self, member: Member) -> str:
        ours = member.fingerprint
        assert ours is not None
        if ours.tokenizer_digest != self._tokenizer_digest:
            return "tokenizer_digest differs from the router's; start both with the same model"
        difference = self.reference.difference(ours) if self.reference else None
        if difference is None:
            return ""
        name, theirs, its = difference
        return f"{name} is {its!r}, the decode workers have {theirs!r}; start all with the same {name}"

    def _vote(self) -> None:
        """Find the reference anew, after every change of who is connected."""
        votes = Counter(
            member.fingerprint
            for member in self.members.values()
            if member.connected
            and member.role == Role.DECODE
            and member.fingerprint is not None
            and member.fingerprint.tokenizer_digest == self._tokenizer_digest
        )
        self.reference = votes.most_common(1)[0][0] if votes else None
