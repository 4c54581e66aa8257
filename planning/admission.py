"""Whether a request goes to the workers now, waits for room there, or is told no.

    enter -- the key has too many, or the router --> Refuse
      |
    arrive -- room, and nobody waits --> Admit ----------------------.
      |-- the key has no tokens left --> Refuse                      |
      |-- it would miss its target by far --> Refuse                 v
      '--> Wait -- take: its turn -------------------------------> running --> leave, exit
             '-- its time is up, its client gone, a more entitled one came --> leave, exit

No clock, no I/O: every call that depends on time is told the time, in seconds.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from planning.fair_queue import FairQueue, Share, Ticket
from planning.key_limits import KeyLimits

MIN_RETRY_S, MAX_RETRY_S = 1.0, 60.0
GUESSED_ANSWER_TOKENS = 256.0
ANSWERS_REMEMBERED = 100
TURNS_REMEMBERED = 30


class Refusal(StrEnum):
    """Why a request is told no: a metric label."""

    BUSY = "busy"
    QUEUE_FULL = "queue_full"
    QUEUE_TIMEOUT = "queue_timeout"
    KEY_CONCURRENCY = "key_concurrency"
    KEY_TOKENS = "key_tokens"
    TTFT_SLO = "ttft_slo"


@dataclass(frozen=True, slots=True)
class Admit:
    """Go on at once."""


@dataclass(frozen=True, slots=True)
class Wait:
    """`expected_s`: how long, as far as is known. At `at_most_s` it is over, for the reason `then`.
    `displaced` has to leave: it was less entitled to its place."""

    expected_s: float
    at_most_s: float
    then: Refusal
    displaced: Ticket | None = None


@dataclass(frozen=True, slots=True)
class Refuse:
    reason: Refusal
    retry_after_s: float


Decision = Admit | Wait | Refuse


@dataclass(frozen=True, slots=True)
class Bounds:
    """`max_requests`: in the router at once, those that wait among them. `slo_factor`: by how much a request
    may be expected to miss its target of the first token and still be taken; 0 = by any."""

    max_requests: int
    max_waiting: int
    queue_timeout_s: float
    slo_factor: float


class WaitingRoom:
    """All requests of one router, from their first byte to their last."""

    def __init__(self, bounds: Bounds) -> None:
        self._bounds = bounds
        self._queue = FairQueue()
        self._keys = KeyLimits()
        self._running: set[int] = set()
        self._pace = _Pace()
        self._answer_tokens = GUESSED_ANSWER_TOKENS
        self.num_requests = 0
        self.num_running_sequences = 0

    @property
    def num_waiting(self) -> int:
        return len(self._queue)

    def enter(self, share: Share, now: float) -> Refuse | None:
        """Count a request before anything is known of it."""
        if self.num_requests >= self._bounds.max_requests:
            return Refuse(Refusal.BUSY, MIN_RETRY_S)
        if not self._keys.enter(share, now):
            return Refuse(Refusal.KEY_CONCURRENCY, MIN_RETRY_S)
        self.num_requests += 1
        return None

    def exit(self, share: Share) -> None:
        """A request that has entered is over."""
        self.num_requests -= 1
        self._keys.exit(share)

    def arrive(
        self, ticket: Ticket, room: float, now: float, *, ttft_s: float = 0.0, ttft_slo_s: float = 0.0
    ) -> Decision:
        """What becomes of a request whose plan is known. `room`: sequences that the workers can take.
        `ttft_s`: what its plan takes, without the wait here; `ttft_slo_s`: its target, 0 = none."""
        missing_s = self._keys.charge(ticket.share, ticket.cost_tokens, now)
        if missing_s > 0:
            return Refuse(Refusal.KEY_TOKENS, missing_s)
        decision = self._decide(ticket, room, now, ttft_s, ttft_slo_s)
        if isinstance(decision, Refuse):
            self._keys.refund(ticket.share, ticket.cost_tokens)
        return decision

    def _decide(self, ticket: Ticket, room: float, now: float, ttft_s: float, ttft_slo_s: float) -> Decision:
        bounds = self._bounds
        latest_s = bounds.slo_factor * ttft_slo_s - ttft_s if bounds.slo_factor and ttft_slo_s else None
        if not len(self._queue) and room > 0:
            if latest_s is not None and latest_s < 0:
                return Refuse(Refusal.TTFT_SLO, _bounded(ttft_s - ttft_slo_s))
            self._run(ticket)
            return Admit()
        if not len(self._queue):
            self._pace.starts(now)
        self._queue.push(ticket)
        expected_s = self._pace.seconds(self._queue.tokens_before(ticket))
        if latest_s is not None and expected_s > latest_s:
            self._queue.remove(ticket)
            return Refuse(Refusal.TTFT_SLO, _bounded(expected_s + ttft_s - ttft_slo_s))
        displaced = self._displaced(ticket)
        if displaced is ticket:
            return self.full()
        if latest_s is None or latest_s >= bounds.queue_timeout_s:
            return Wait(expected_s, bounds.queue_timeout_s, Refusal.QUEUE_TIMEOUT, displaced)
        return Wait(expected_s, latest_s, Refusal.TTFT_SLO, displaced)

    def _displaced(self, ticket: Ticket) -> Ticket | None:
        if len(self._queue) <= self._bounds.max_waiting:
            return None
        displaced = self._queue.least_entitled(ticket)
        self._queue.remove(displaced)
        if displaced is not ticket:
            self._keys.refund(displaced.share, displaced.cost_tokens)
        return displaced

    def full(self) -> Refuse:
        """To one without a place: it may come again when about half of those that wait have gone."""
        return Refuse(Refusal.QUEUE_FULL, _bounded(self._pace.seconds(self._queue.tokens) / 2))

    def take(self, room: float, now: float) -> list[Ticket]:
        """Those whose turn it is. A request of many sequences goes when there is room for one: it would wait
        for ever for all of it, and workers have queues of their own."""
        taken: list[Ticket] = []
        while room > 0 and len(self._queue):
            ticket = self._queue.pop()
            self._run(ticket)
            self._pace.took(ticket.cost_tokens, now)
            room -= ticket.num_sequences
            taken.append(ticket)
        return taken

    def leave(self, ticket: Ticket, used_tokens: int) -> None:
        """A request that was admitted or waited is over. Idempotent. `used_tokens`: of prompt and answers, as
        far as it got."""
        if self._queue.remove(ticket):
            self._keys.refund(ticket.share, ticket.cost_tokens)
        elif ticket.number in self._running:
            self._running.remove(ticket.number)
            self.num_running_sequences -= ticket.num_sequences
            self._keys.refund(ticket.share, ticket.cost_tokens - used_tokens)

    def answered(self, num_tokens: int) -> None:
        """An answer had so many tokens."""
        self._answer_tokens += (num_tokens - self._answer_tokens) / ANSWERS_REMEMBERED

    def answer_tokens(self, limit: int | None, at_most: int) -> int:
        """What an answer is expected to have: the client's limit, else what answers had lately."""
        return min(at_most, limit or max(1, round(self._answer_tokens)))

    def _run(self, ticket: Ticket) -> None:
        self._running.add(ticket.number)
        self.num_running_sequences += ticket.num_sequences


class _Pace:
    """Cost tokens a second at which those that wait are let in; the last TURNS_REMEMBERED count most."""

    def __init__(self) -> None:
        self._tokens = self._seconds = self._last_at = 0.0

    def starts(self, now: float) -> None:
        """Somebody waits again; the time before says nothing."""
        self._last_at = now

    def took(self, tokens: int, now: float) -> None:
        keep = 1 - 1 / TURNS_REMEMBERED
        self._tokens = keep * self._tokens + tokens
        self._seconds = keep * self._seconds + now - self._last_at
        self._last_at = now

    def seconds(self, tokens: float) -> float:
        """Until so many have been let in; 0.0 while nobody has ever waited."""
        return tokens * self._seconds / self._tokens if self._tokens else 0.0


def _bounded(retry_after_s: float) -> float:
    return min(max(retry_after_s, MIN_RETRY_S), MAX_RETRY_S)
