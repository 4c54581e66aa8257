"""Requests that wait for room: priorities first, then each API key's fair share, then first come.

    priority 0:  turns -> [key a: t1 t4 t7] -> [key b: t2] -> [key c: t3 t5]      deficit round robin
    priority 5:  turns -> [key a: t6]                                             only when 0 is empty

A key's turn begins with QUANTUM_TOKENS times its weight added to its deficit; its oldest requests go as
long as the deficit pays for them, then the turn is the next key's. What is not spent is kept while the
key has requests waiting (Shreedhar and Varghese, "Efficient fair queuing using deficit round robin", 1995).
So two keys that both wait have been given the same, by weight, within one quantum and one request's cost.
"""

from __future__ import annotations

import math
from collections import OrderedDict, deque
from dataclasses import dataclass, field

QUANTUM_TOKENS = 1024
MIN_PRIORITY, MAX_PRIORITY = -100, 100


@dataclass(frozen=True, slots=True)
class Share:
    """What an API key may have; 0 = no limit.

    `weight`: its share beside other keys'. `priority_floor`: the most urgent priority that it can ask for.
    `max_concurrent`: requests in the router at once. `max_tokens_per_minute`: prompt and answer.
    """

    name: str
    weight: float = 1.0
    priority_floor: int = MIN_PRIORITY
    max_concurrent: int = 0
    max_tokens_per_minute: int = 0


@dataclass(frozen=True, slots=True)
class Ticket:
    """A request at the door. `number` is its own; a lower `priority` goes first; `cost_tokens` is what its
    prompt and answer are expected to have; `num_sequences` what it occupies of the workers."""

    number: int
    share: Share
    priority: int
    cost_tokens: int
    num_sequences: int = 1


@dataclass(slots=True)
class _Line:
    """The waiting requests of one key in one priority, oldest first. `tokens` is their cost."""

    share: Share
    tickets: OrderedDict[int, Ticket] = field(default_factory=OrderedDict)
    tokens: int = 0
    deficit: float = 0.0

    @property
    def first(self) -> Ticket:
        return next(iter(self.tickets.values()))

    @property
    def last(self) -> Ticket:
        return next(reversed(self.tickets.values()))

    @property
    def length(self) -> float:
        """In requests, by weight."""
        return len(self.tickets) / self.share.weight

    @property
    def per_turn(self) -> float:
        return QUANTUM_TOKENS * self.share.weight


class _Turns:
    """One priority: the lines of all keys that wait in it; the first one has its turn. `tokens` is their
    cost."""

    def __init__(self) -> None:
        self.lines: dict[str, _Line] = {}
        self.tokens = 0
        self._order: deque[_Line] = deque()

    def push(self, ticket: Ticket) -> None:
        line = self.lines.get(ticket.share.name)
        if line is None:
            line = self.lines[ticket.share.name] = _Line(ticket.share)
            self._order.append(line)
            if len(self._order) == 1:
                line.deficit = line.per_turn
        line.tickets[ticket.number] = ticket
        line.tokens += ticket.cost_tokens
        self.tokens += ticket.cost_tokens

    def pop(self) -> Ticket:
        if self._order[0].deficit < self._order[0].first.cost_tokens:
            self._skip_rounds_of_nobody()
        while self._order[0].deficit < self._order[0].first.cost_tokens:
            self._order.rotate(-1)
            self._order[0].deficit += self._order[0].per_turn
        line = self._order[0]
        ticket = line.first
        line.deficit -= ticket.cost_tokens
        self.remove(ticket)
        return ticket

    def remove(self, ticket: Ticket) -> None:
        line = self.lines[ticket.share.name]
        del line.tickets[ticket.number]
        line.tokens -= ticket.cost_tokens
        self.tokens -= ticket.cost_tokens
        if line.tickets:
            return
        had_turn = self._order[0] is line
        del self.lines[ticket.share.name]
        self._order.remove(line)
        if had_turn and self._order:
            self._order[0].deficit += self._order[0].per_turn

    def _skip_rounds_of_nobody(self) -> None:
        """Give all at once what whole rounds would give in which no deficit is enough."""
        rounds = min(math.ceil((x.first.cost_tokens - x.deficit) / x.per_turn) for x in self._order) - 1
        if rounds > 0:
            for line in self._order:
                line.deficit += rounds * line.per_turn


class FairQueue:
    """`push`, `remove` and most of `pop` cost the same whatever waits; the rest costs the number of keys."""

    def __init__(self) -> None:
        self._priorities: dict[int, _Turns] = {}
        self._tickets: dict[int, Ticket] = {}

    def __len__(self) -> int:
        return len(self._tickets)

    @property
    def tokens(self) -> int:
        """Cost of all that wait."""
        return sum(turns.tokens for turns in self._priorities.values())

    def push(self, ticket: Ticket) -> None:
        self._tickets[ticket.number] = ticket
        self._priorities.setdefault(ticket.priority, _Turns()).push(ticket)

    def pop(self) -> Ticket:
        """Who goes next. The queue must not be empty."""
        priority = min(self._priorities)
        ticket = self._priorities[priority].pop()
        self._forget(ticket)
        return ticket

    def remove(self, ticket: Ticket) -> bool:
        """Take out a request that waits no more. Idempotent; False where it was not there."""
        if ticket.number not in self._tickets:
            return False
        self._priorities[ticket.priority].remove(ticket)
        self._forget(ticket)
        return True

    def least_entitled(self, newcomer: Ticket) -> Ticket:
        """Whom to turn away of those that wait, `newcomer` among them: of the last priority, of the key with
        the longest line by weight, the newest. Of equal lines it is the newcomer's."""
        lines = self._priorities[max(self._priorities)].lines
        longest = max(line.length for line in lines.values())
        own = lines.get(newcomer.share.name)
        if own is not None and newcomer.number in own.tickets and own.length >= longest:
            return newcomer
        return next(line for line in lines.values() if line.length >= longest).last

    def tokens_before(self, ticket: Ticket) -> float:
        """Cost of what goes before a request that waits and is the last of its line, if nobody else comes:
        more urgent priorities, its own line, and of other keys' as much as they get meanwhile."""
        urgent = sum(turns.tokens for p, turns in self._priorities.items() if p < ticket.priority)
        lines = self._priorities[ticket.priority].lines
        own = lines[ticket.share.name]
        meanwhile = own.tokens / own.share.weight
        others = sum(
            min(line.tokens, meanwhile * line.share.weight) for line in lines.values() if line is not own
        )
        return urgent + own.tokens - ticket.cost_tokens + others

    def _forget(self, ticket: Ticket) -> None:
        del self._tickets[ticket.number]
        if not self._priorities[ticket.priority].lines:
            del self._priorities[ticket.priority]
