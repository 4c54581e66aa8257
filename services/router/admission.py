"""Requests at the router's door: who goes on, who waits for the fleet to have room, who is told no.

`planning.admission` decides; here is what it needs to know (the room, the time) and what comes of it: a
task that waits, an error with its `Retry-After`, counts. While there is room a request meets a comparison
or two; only while somebody waits a timer looks for room again.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

from core.clock import Clock, monotonic
from core.errors import Overloaded
from core.settings import Settings
from planning.admission import Admit, Bounds, Refusal, Refuse, Wait, WaitingRoom
from planning.estimate import Targets
from planning.fair_queue import Share, Ticket
from services.router.fleet import Fleet
from services.router.metrics import RouterMetrics
from services.router.schemas import GenerationBody

if TYPE_CHECKING:
    from services.router.generation import Generation, Part

ROOM_PER_SEAT = 1.5
"""Sequences sent to a worker for each that it runs at once: it should never be without one while its State
is on the way here, and have few to choose from otherwise, since priorities and shares hold only here."""

LOOK_EVERY_S = 0.02
"""A worker says how it fares when that changes, each 50 ms at most."""


class Admission:
    """All requests of one router. `fleet` is None while it loads."""

    def __init__(
        self,
        settings: Settings,
        metrics: RouterMetrics,
        fleet: Callable[[], Fleet | None],
        clock: Clock = monotonic,
    ) -> None:
        bounds = Bounds(
            settings.max_concurrent_requests,
            settings.max_queued_requests,
            settings.queue_timeout_s,
            settings.reject_slo_factor,
        )
        self.waiting_room = WaitingRoom(bounds)
        self._bounds, self._metrics, self._fleet, self._clock = bounds, metrics, fleet, clock
        self._numbers = itertools.count()
        self._turns: dict[int, asyncio.Future[Exception | None]] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._free_then, self._running_then, self._look_at = 0.0, 0, 0.0
        self._num_placed = 0  # sequences that are on workers
        self._counters: dict[tuple[str, str], Callable[[], None]] = {}
        metrics.in_flight.set_function(lambda: self.waiting_room.num_requests)
        metrics.queued.set_function(lambda: self.waiting_room.num_waiting)

    @contextmanager
    def visit(self, share: Share) -> Iterator[Visit]:
        """One request, from before its body is read to its end. Raises Overloaded."""
        refused = self.waiting_room.enter(share, self._clock())
        if refused is not None:
            raise self._no(share, refused)
        visit = Visit(self, share)
        try:
            yield visit
        finally:
            visit.close()
            self.waiting_room.exit(share)

    async def turn(self, ticket: Ticket, ttft_s: float, ttft_slo_s: float) -> bool:
        """Wait until `ticket` may go on; whether that took any time. Raises Overloaded, or what `Visit.fail`
        was told meanwhile."""
        room, share = self.waiting_room, ticket.share
        decision = room.arrive(ticket, self._free(), self._clock(), ttft_s=ttft_s, ttft_slo_s=ttft_slo_s)
        if isinstance(decision, Refuse):
            raise self._no(share, decision, ttft_slo_s)
        if isinstance(decision, Admit):
            self._count(share, "admitted")
            self._metrics.router_queue.observe(0.0)
            return False
        if decision.displaced is not None:
            self._end_turn(decision.displaced, self._no(decision.displaced.share, room.full()))
        await self._wait(ticket, decision, ttft_s, ttft_slo_s)
        return True

    async def _wait(self, ticket: Ticket, decision: Wait, ttft_s: float, ttft_slo_s: float) -> None:
        turn = self._turns[ticket.number] = asyncio.get_running_loop().create_future()
        began = self._clock()
        self._look_later()
        try:
            async with asyncio.timeout(decision.at_most_s):
                ended = await turn
        except TimeoutError:
            late_s = self._clock() - began + ttft_s - ttft_slo_s
            retry_s = late_s if decision.then is Refusal.TTFT_SLO else self.waiting_room.full().retry_after_s
            raise self._no(ticket.share, Refuse(decision.then, max(1.0, retry_s)), ttft_slo_s) from None
        finally:
            del self._turns[ticket.number]
        if ended is not None:
            raise ended
        self._count(ticket.share, "admitted_later")
        self._metrics.router_queue.observe(self._clock() - began)

    def ticket(self, share: Share, priority: int, cost_tokens: int, num_sequences: int) -> Ticket:
        priority = max(priority, share.priority_floor)
        return Ticket(next(self._numbers), share, priority, cost_tokens, num_sequences)

    def fail(self, ticket: Ticket, error: Exception) -> None:
        """Whoever waits with this ticket gets `error`; nothing where nobody does."""
        self._end_turn(ticket, error)

    def placed(self, num_sequences: int) -> None:
        """So many more (or fewer, below 0) sequences of this router are on workers, whose loads tell."""
        self._num_placed += num_sequences

    def leave(self, ticket: Ticket, used_tokens: int) -> None:
        """A request that had a turn, or waited for one, is over. Idempotent."""
        self.waiting_room.leave(ticket, used_tokens)
        if used_tokens:
            self._metrics.key_tokens.labels(ticket.share.name).inc(used_tokens)
        if self.waiting_room.num_waiting:
            self._let_in()

    def _end_turn(self, ticket: Ticket, ended: Exception | None) -> None:
        turn = self._turns.get(ticket.number)
        if turn is not None and not turn.done():
            turn.set_result(ended)

    def _let_in(self) -> None:
        for ticket in self.waiting_room.take(self._free(), self._clock()):
            self._end_turn(ticket, None)

    def _look_later(self) -> None:
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(LOOK_EVERY_S, self._look)

    def _look(self) -> None:
        """A worker has fewer sequences than it had, or there are more workers: nobody says so here."""
        self._timer = None
        try:
            self._let_in()
        finally:
            if self.waiting_room.num_waiting:
                self._look_later()

    def _free(self) -> float:
        """Sequences that the fleet has room for: as of the last look, less what was let in since."""
        now, running = self._clock(), self.waiting_room.num_running_sequences
        if now >= self._look_at:
            fleet = self._fleet()
            seats, there = fleet.seats() if fleet else (0, 0)
            on_their_way = running - self._num_placed
            self._free_then = ROOM_PER_SEAT * seats - there - on_their_way
            self._running_then, self._look_at = running, now + LOOK_EVERY_S
        return self._free_then - (running - self._running_then)

    def _no(self, share: Share, refuse: Refuse, ttft_slo_s: float = 0.0) -> Overloaded:
        """The error that tells a client so."""
        self._count(share, refuse.reason.value)
        later = f"try again in {refuse.retry_after_s:.0f} s"
        bounds = self._bounds
        match refuse.reason:
            case Refusal.BUSY:
                why = f"{bounds.max_requests} requests are being answered already; {later}"
            case Refusal.QUEUE_FULL:
                why = f"no worker has room, and {bounds.max_waiting} requests wait already; {later}"
            case Refusal.QUEUE_TIMEOUT:
                why = f"no worker had room for it within {bounds.queue_timeout_s:g} s; {later}"
            case Refusal.TTFT_SLO:
                why = (
                    f"the first token would take more than {bounds.slo_factor:g} times its target of "
                    f"{ttft_slo_s:g} s; {later}, or ask for a later target"
                )
            case Refusal.KEY_CONCURRENCY:
                why = (
                    f"the API key {share.name} has {share.max_concurrent} requests here already, its limit; "
                    f"let one end"
                )
            case Refusal.KEY_TOKENS:
                why = (
                    f"the API key {share.name} has had its {share.max_tokens_per_minute} tokens a minute; "
                    f"{later}, or ask for fewer"
                )
        return Overloaded(why, retry_after_s=refuse.retry_after_s)

    def _count(self, share: Share, decision: str) -> None:
        count = self._counters.get((share.name, decision))
        if count is None:
            count = self._metrics.admissions.labels(share.name, decision).inc
            self._counters[share.name, decision] = count
        count()


class Visit:
    """One request in the router."""

    def __init__(self, admission: Admission, share: Share) -> None:
        self._admission, self._share = admission, share
        self._ticket: Ticket | None = None
        self._error: Exception | None = None
        self._used_tokens = 0
        self._num_placed = 0

    async def turn(self, body: GenerationBody, parts: Sequence[Part], targets: Targets) -> bool:
        """Wait until the request may go to its workers; True where it had to, so that its plan is old.
        Raises Overloaded, or the error that `fail` was told."""
        if self._error is not None:
            raise self._error
        answers = self._admission.waiting_room.answer_tokens
        cost = sum(
            len(part.prompt.token_ids) + body.n * answers(body.limit, part.plan.max_tokens) for part in parts
        )
        self._ticket = self._admission.ticket(self._share, body.priority, cost, body.n * len(parts))
        ttft_s = max(part.plan.chosen.estimate.ttft_s for part in parts)
        return await self._admission.turn(self._ticket, ttft_s, targets.ttft_s)

    def fail(self, error: Exception) -> None:
        """The client left: it waits no more."""
        self._error = error
        if self._ticket is not None:
            self._admission.fail(self._ticket, error)

    def placed(self, generation: Generation) -> None:
        """It is on its workers now."""
        self._num_placed = sum(len(part.choices) for part in generation.parts)
        self._admission.placed(self._num_placed)

    def served(self, generation: Generation) -> None:
        """What it has used in the end."""
        self._used_tokens = generation.num_prompt_tokens + generation.num_generated_tokens
        for part in generation.parts:
            for choice in part.choices:
                if choice.finished:
                    self._admission.waiting_room.answered(choice.num_tokens)

    def close(self) -> None:
        """Give its place to others. Idempotent."""
        ticket, self._ticket = self._ticket, None
        placed, self._num_placed = self._num_placed, 0
        self._admission.placed(-placed)
        if ticket is not None:
            self._admission.leave(ticket, self._used_tokens)
