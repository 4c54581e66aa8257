"""Every fault, on every process, at every moment of a request: the answer is GOLD, soon; nothing is left.

Faults: SIGKILL, SIGSTOP, SIGTERM, cut connections, connections through which nothing passes. Victims: prefill
worker, decode worker, router. Moments: in the victim's queue, in the prompt's computing, while blocks are
read, in mid-answer, before the last token. The client streams or does not, and wants one choice or two. All
of this is real: processes, gRPC, the model; workers stand still at fault points until the fault has struck.

Each of the 70 triples of fault, victim and moment is tried in one of the four styles, which go round (`cells`
has the table). Left out are the other three styles of each triple, since every style meets every fault,
victim and moment elsewhere, and silence around a router: to its workers it is a router that is stopped, to
its client one that is cut off.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import product

import pytest
from answers import Answer, ask
from cells import CELLS, STYLES, Cell, Fault, Moment, Style, Victim, skipped
from cluster import Process, matches_gold, prompt
from fault_cluster import FaultCluster
from scene import FILLER, PROMPT, TOKENS, Scene, plan_of

WITHIN_S = 5.0
"""Of the time without a fault."""

SMOKE = {
    (Fault.KILL, Victim.D, Moment.DECODE),
    (Fault.KILL, Victim.P, Moment.HANDOFF),
    (Fault.KILL, Victim.ROUTER, Moment.DECODE),
    (Fault.STOP, Victim.D, Moment.LAST),
    (Fault.TERM, Victim.D, Moment.QUEUE),
    (Fault.CUT, Victim.D, Moment.PREFILL),
}
"""Tried in every run."""


def parameters() -> list:
    marks = {True: (), False: (pytest.mark.slow,)}
    return [
        pytest.param(cell, id=str(cell), marks=marks[(cell.fault, cell.victim, cell.moment) in SMOKE])
        for cell in CELLS
    ]


@pytest.fixture(scope="module")
def undisturbed(fleet: FaultCluster) -> Callable[[Style, str], float]:
    """Seconds of an answer without a fault: the best of a few, measured when first asked for."""
    took: dict[tuple[Style, str], float] = {}

    def once(style: Style, plan: str) -> float:
        answer = ask(fleet, PROMPT, style, plan, max_tokens=TOKENS)
        assert_complete(answer, PROMPT, style.n, TOKENS)
        return answer.ended_at - answer.sent_at

    def measure(style: Style, plan: str) -> float:
        if (style, plan) not in took:
            took[style, plan] = min(once(style, plan) for _ in range(3))
        return took[style, plan]

    return measure


def assert_complete(answer: Answer, name: str, n: int, tokens: int) -> None:
    assert (answer.status, answer.error, answer.broke, answer.done) == (200, "", False, True), answer
    assert len(answer.ids) == n
    assert all(matches_gold(name, ids, tokens) for ids in answer.ids.values()), answer
    assert answer.finish == dict.fromkeys(range(n), "length")
    assert answer.usage["prompt_tokens"] == len(prompt(name))
    assert answer.usage["completion_tokens"] == n * tokens, "each token counts once"


def assert_clean_error(answer: Answer) -> None:
    assert answer.broke or answer.status >= 500 or answer.error, answer
    assert not answer.done
    assert not answer.finish, "what was cut short must not look complete"


@pytest.mark.parametrize("cell", parameters())
def test_cell(
    cluster: FaultCluster,
    undisturbed: Callable[[Style, str], float],
    background: ThreadPoolExecutor,
    cell: Cell,
    record_property: Callable[[str, object], None],
):
    usual_s = undisturbed(cell.style, plan_of(cell.moment, cell.victim))
    resumed_before = cluster.num_resumes()
    scene = Scene(cluster, cell, background)
    answer, victim, took_s = scene.play()
    record_property("over_s", round(took_s - usual_s, 2))
    if cell.is_answered:
        assert_complete(answer, PROMPT, cell.style.n, TOKENS)
    else:
        assert_clean_error(answer)
    assert took_s - usual_s < WITHIN_S
    fillers = [filler.result(30) for filler in scene.fillers]
    if cell.is_answered:
        for filler in fillers:
            assert_complete(filler, FILLER, len(filler.ids), 1)
    if victim is not cluster.router or cell.fault not in (Fault.KILL, Fault.TERM):
        resumes = [len(cluster.record(each.request_id)["resumes"]) for each in (answer, *fillers)]
        record_property("resumes", resumes)
        assert resumes[0] in cell.resumes
        assert cluster.num_resumes() - resumed_before == sum(resumes)
    assert_survivors_rest(cluster, victim)
    if cell.fault is Fault.TERM:
        assert victim.wait_end(5) == 0


def assert_survivors_rest(cluster: FaultCluster, victim: Process) -> None:
    cluster.assert_at_rest([worker for worker in cluster.workers if worker is not victim])


def test_every_style_meets_every_fault_victim_and_moment():
    assert len(CELLS) == 70
    triples = {(cell.fault, cell.victim, cell.moment) for cell in CELLS}
    whole = set(product(Fault, Victim, Moment))
    assert {(fault, victim) for fault, victim, _ in whole - triples} == {(Fault.SILENCE, Victim.ROUTER)}
    assert all(skipped(fault, victim) for fault, victim, _ in whole - triples)
    assert triples >= SMOKE
    for each in (*Fault, *Victim, *Moment):
        met = {cell.style for cell in CELLS if each in (cell.fault, cell.victim, cell.moment)}
        assert met == set(STYLES), each
