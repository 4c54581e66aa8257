"""One cell played through: bring a request to its moment, strike, take the answer."""

from __future__ import annotations

import signal
import time
import uuid
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial

from answers import Answer, ask
from cells import Cell, Fault, Moment, Style, Victim
from cluster import Process, wait_until
from fault_cluster import MAX_NUM_SEQS, SILENCE_S, FaultCluster

PROMPT = "story-129"
"""Eight blocks that may be handed over, in two steps of 64 tokens, and one token."""

TOKENS = 8
FILLER = "story-17"
MAX_FILLERS = 16
ONE = Style(stream=False, n=1)


def plan_of(moment: Moment, victim: Victim) -> str:
    """Where the victim is to be what the moment asks for."""
    on_decode = moment in (Moment.QUEUE, Moment.PREFILL) and victim is not Victim.P
    return "local" if on_decode else "disaggregated"


@dataclass
class Scene:
    """`fillers`: requests that stand in the way of the one that counts."""

    cluster: FaultCluster
    cell: Cell
    background: ThreadPoolExecutor
    fillers: list[Future[Answer]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.request_id = uuid.uuid4().hex
        self.asked: Future[Answer] | None = None

    def play(self) -> tuple[Answer, Process, float]:
        """Returns the answer, the victim, and the seconds that the answer took, without those in which the
        test held it or kept a router stopped."""
        with_it = self._bring_to_its_moment()
        held_at = time.monotonic()
        victim = self._victim(with_it)
        struck_at = self._strike(victim)
        assert self.asked
        answer = self.asked.result(60)
        return answer, victim, answer.ended_at - answer.sent_at - (struck_at - held_at)

    # ---- the moment

    def _bring_to_its_moment(self) -> Process:
        """Returns the worker that holds the request; in the router's queue none does."""
        cluster, cell = self.cluster, self.cell
        at_p = cell.victim is Victim.P
        match cell.moment:
            case Moment.QUEUE if cell.victim is Victim.ROUTER:
                return self._queue_in_router()
            case Moment.QUEUE:
                return self._queue_in_worker([cluster.p] if at_p else cluster.decoders)
            case Moment.PREFILL:
                return self._hold("engine.step", [cluster.p] if at_p else cluster.decoders, 1)
            case Moment.HANDOFF:
                return self._hold("transfer.read", cluster.decoders, 0)
            case Moment.DECODE:
                return self._hold("engine.step", cluster.decoders, TOKENS // 2)
            case Moment.LAST:
                return self._hold("engine.step", cluster.decoders, TOKENS - 1)

    def _hold(self, point: str, workers: list[Process], free: int) -> Process:
        self.cluster.close_gate(point, workers, free)
        self._ask()
        return self.cluster.wait_held(point)[0]

    def _queue_in_worker(self, workers: list[Process]) -> Process:
        """Behind fillers whose step stands still, on each of them."""
        cluster, start = self.cluster, f"{workers[0].role}.start"
        cluster.close_gate(start, workers)
        while len(held := cluster.held_at(start)) < len(workers):
            assert len(self.fillers) < MAX_FILLERS, f"all went to {held}"
            behind = partial(self._worker_of, self._fill(ONE, plan_of(Moment.QUEUE, self.cell.victim)), held)
            wait_until(lambda h=held, b=behind: len(cluster.held_at(start)) > len(h) or b() is not None, 10)
        cluster.close_gate("engine.step", workers)
        cluster.open_gates(start)
        cluster.wait_held("engine.step", len(workers))
        cluster.close_gate(start, workers)
        self._ask()
        wait_until(lambda: self._worker_of(self.request_id, cluster.held_at(start)) is not None, 10)
        with_it = self._worker_of(self.request_id, workers)
        assert with_it
        cluster.open_gates(start)
        wait_until(lambda: with_it not in cluster.held_at(start), 5)
        return with_it

    def _queue_in_router(self) -> Process:
        """Behind as many as the workers have places for and one that waits itself."""
        cluster = self.cluster
        cluster.close_gate("decode.start", cluster.decoders)
        sent_before = cluster.num_sent()
        while cluster.num_queued() == 0:
            self._fill(Style(stream=False, n=MAX_NUM_SEQS), "local")
            wait_until(
                lambda: cluster.num_sent() - sent_before + cluster.num_queued() == len(self.fillers), 5
            )
        self._ask()
        wait_until(lambda: cluster.num_queued() == 2, 5)
        return cluster.held_at("decode.start")[0]

    def _worker_of(self, request_id: str, workers: list[Process]) -> Process | None:
        """Which of these it was sent to, if to any."""
        plan = self.cluster.record(request_id).get("plan") or {}
        return next((worker for worker in workers if plan.get(worker.role) == worker.name), None)

    def _ask(self) -> None:
        plan = plan_of(self.cell.moment, self.cell.victim)
        self.asked = self.background.submit(
            ask, self.cluster, PROMPT, self.cell.style, plan, self.request_id, max_tokens=TOKENS
        )

    def _fill(self, style: Style, plan: str) -> str:
        """Returns its id."""
        request_id = uuid.uuid4().hex
        filler = self.background.submit(ask, self.cluster, FILLER, style, plan, request_id, max_tokens=1)
        self.fillers.append(filler)
        return request_id

    # ---- the fault

    def _victim(self, with_it: Process) -> Process:
        cluster = self.cluster
        return {Victim.P: cluster.p, Victim.D: with_it, Victim.ROUTER: cluster.router}[self.cell.victim]

    def _strike(self, victim: Process) -> float:
        """Returns when the way was free again for the answer, as far as the test stood in it."""
        strike: Callable[[Process], None] = {
            Fault.KILL: Process.kill,
            Fault.STOP: self.cluster.stop_process,
            Fault.TERM: lambda process: process.kill(signal.SIGTERM),
            Fault.CUT: self._cut,
            Fault.SILENCE: self._silence,
        }[self.cell.fault]
        strike(victim)
        self.cluster.open_gates()
        struck_at = time.monotonic()
        if victim is not self.cluster.router:
            return struck_at
        if self.cell.fault is Fault.STOP:
            time.sleep(SILENCE_S + 0.5)  # the fault is that it does nothing for so long
            self.cluster.go_on()
            return time.monotonic()
        if self.cell.fault is Fault.CUT:
            wait_until(lambda: "ready" not in self.cluster.states().values(), 5)
            for proxy in self.cluster.proxies.values():
                proxy.heal()
        return struck_at

    def _cut(self, victim: Process) -> None:
        """Of a router all connections to workers; they are there again before its patience ends."""
        for name, proxy in self.cluster.proxies.items():
            if victim.name in (name, self.cluster.router.name):
                proxy.cut()

    def _silence(self, victim: Process) -> None:
        self.cluster.proxies[victim.name].silence()
