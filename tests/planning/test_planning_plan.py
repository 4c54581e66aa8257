"""The planner as tables: who serves a request, and why."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace

import pytest

from core.errors import ContextLengthExceeded, InvalidParameter, Unavailable
from core.kv import Fingerprint
from core.request import PlanKind
from planning.estimate import Targets
from planning.plan import Forced, RequestFacts, plan
from planning.reason import Reason
from planning.worker_view import FleetView, WorkerView

PRINT = Fingerprint("m", "t", 30, 3, 64, 16, "fp32", "default/100000", 2048)
D = WorkerView("d", "d:1", "1", PRINT, total_blocks=128)
P = WorkerView("p", "p:1", "p1", PRINT, total_blocks=128)
OTHER_P = replace(P, fingerprint=replace(PRINT, block_size=32))
SMALL_P = replace(P, total_blocks=4)


def decide(facts: int | RequestFacts = 100, fleet=None, forced=Forced.AUTO, seed=0, **changes):
    if isinstance(facts, int):
        facts = RequestFacts(facts, **changes)
    fleet = fleet or FleetView((D,), (P,))
    return plan(facts, fleet, forced, targets=Targets(), min_remote_tokens=64, rng=random.Random(seed))


@pytest.mark.parametrize(
    ("tokens", "prefill", "forced", "kind", "reason"),
    [
        (81, (P,), "auto", "disaggregated", Reason.CHEAPEST_PAIR),
        (65, (P,), "auto", "disaggregated", Reason.CHEAPEST_PAIR),
        (64, (P,), "auto", "local", Reason.SHORT_PROMPT),
        (1, (P,), "auto", "local", Reason.SHORT_PROMPT),
        (81, (), "auto", "local", Reason.NO_PREFILL_WORKER),
        (81, (OTHER_P,), "auto", "local", Reason.NO_COMPATIBLE_PREFILL),
        (81, (SMALL_P,), "auto", "local", Reason.PROMPT_EXCEEDS_PREFILL_POOL),
        (80, (SMALL_P,), "auto", "disaggregated", Reason.CHEAPEST_PAIR),
        (81, (OTHER_P, SMALL_P, P), "auto", "disaggregated", Reason.CHEAPEST_PAIR),
        (81, (P,), "local", "local", Reason.FORCED_LOCAL),
        (17, (P,), "disaggregated", "disaggregated", Reason.FORCED_DISAGGREGATED),
    ],
)
def test_kind_and_reason(tokens, prefill, forced, kind, reason):
    made = decide(tokens, FleetView((D,), prefill), Forced(forced))
    assert (made.kind, made.reason) == (PlanKind(kind), reason)
    assert made.prefill == (P if kind == "disaggregated" and P in prefill else made.prefill)
    assert (made.prefill is None) == (kind == "local")


@pytest.mark.parametrize(
    ("prefill", "why"), [((), "ready"), ((OTHER_P,), "fingerprint"), ((SMALL_P,), "pool")]
)
def test_forced_disaggregated_without_a_usable_prefill_worker_says_why(prefill, why):
    with pytest.raises(Unavailable, match=why) as caught:
        decide(100, FleetView((D,), prefill), Forced.DISAGGREGATED)
    assert caught.value.retry_after_s is None, "nothing says that it will be possible soon"


def test_prompt_logprobs_are_local_and_contradict_a_forced_handoff():
    assert decide(100, prompt_logprobs=True).reason is Reason.NEEDS_PROMPT_LOGPROBS
    with pytest.raises(InvalidParameter):
        decide(100, forced=Forced.DISAGGREGATED, prompt_logprobs=True)


@pytest.mark.parametrize("prefill", [(P,), ()])
def test_a_forced_handoff_of_no_full_block_is_the_clients_mistake(prefill):
    with pytest.raises(InvalidParameter, match="at least 17 tokens") as caught:
        decide(16, FleetView((D,), prefill), Forced.DISAGGREGATED)
    assert caught.value.param == "X-Baton-Plan"


def test_the_next_prompt_sees_the_load_of_the_one_before():
    fleet = FleetView((D, replace(D, worker_id="d2", incarnation="2")), (P,))
    made = decide(100, fleet)
    assert {name: (sent.sequences, sent.tokens) for name, sent in made.work.items()} == {
        made.decode.incarnation: (1, 4),
        "p1": (1, 96),
    }
    after = fleet.given({name: sent.times(3) for name, sent in made.work.items()})
    loads = {each.incarnation: (each.load, each.queued_tokens) for each in (*after.decode, *after.prefill)}
    assert loads == {"1": (0, 0), "2": (0, 0), "p1": (3, 96)} | {made.decode.incarnation: (3, 4)}
    assert after.recent == {made.decode.incarnation: 3, "p1": 3}
    assert decide(100, after, Forced.DISAGGREGATED).decode.incarnation != made.decode.incarnation
    assert fleet.given({}) is fleet


def test_nobody_ready():
    with pytest.raises(Unavailable, match="no decode worker is ready"):
        decide(100, FleetView((), (P,)))


@pytest.mark.parametrize(
    ("tokens", "max_tokens", "default", "expected"),
    [
        (100, 50, None, 50),
        (100, None, None, 1948),
        (100, None, 16, 16),
        (2040, None, 16, 8),
        (2047, None, None, 1),
        (2040, 8, None, 8),
        (2041, 8, None, None),
        (2048, None, None, None),
        (3000, 1, 16, None),
    ],
)
def test_limits(tokens, max_tokens, default, expected):
    facts = RequestFacts(tokens, max_tokens, default, param="messages")
    if expected is not None:
        assert decide(facts).max_tokens == expected
        return
    with pytest.raises(ContextLengthExceeded, match="2048") as caught:
        decide(facts)
    assert caught.value.param == "messages"
    assert str(tokens + (max_tokens or 1)) in caught.value.message


def test_the_pool_limits_as_the_model_does_and_a_larger_worker_is_found():
    small = replace(D, worker_id="small", total_blocks=32)
    with pytest.raises(ContextLengthExceeded, match="512"):
        decide(600, FleetView((small,), (P,)))
    busy = replace(D, load=9)
    assert decide(600, FleetView((small, busy), (P,))).decode == busy
    assert decide(500, FleetView((small, busy), (P,))).decode == small


def test_least_loaded_and_random_among_equals():
    workers = tuple(replace(D, worker_id=str(i), load=load) for i, load in enumerate((3, 1, 1, 1)))
    chosen = Counter(decide(10, FleetView(workers, ()), seed=seed).decode.worker_id for seed in range(300))
    assert set(chosen) == {"1", "2", "3"}
    assert min(chosen.values()) > 60
    prefill = (replace(P, worker_id="busy", incarnation="p2", queued_tokens=500), P)
    assert decide(100, FleetView((D,), prefill)).prefill == P
