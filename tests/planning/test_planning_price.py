"""What plans cost, and which one that makes the choice: each trade-off as a pair of situations."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from core.errors import BatonError
from core.kv import Fingerprint
from core.request import PlanKind
from core.step_model import StepModel
from planning.estimate import Targets
from planning.plan import MAX_OPTIONS, MAX_PAIRED, Forced, RequestFacts, plan
from planning.price import CALL_S, Ask, queue_s, slot_s, spared, token_nbytes
from planning.reason import Reason
from planning.worker_view import FleetView, Sent, WorkerView

PRINT = Fingerprint("m", "t", 30, 3, 64, 16, "fp32", "default/100000", 8192)
PREFILL = StepModel(a=0.01, b=0.001, c=1e-7, num_steps=50)
DECODE = StepModel(a=0.02, b=0.002, c=1e-6, num_steps=50)
D = WorkerView("d", "d:1", "d", PRINT, 512, prefill_model=PREFILL, decode_model=DECODE, max_num_seqs=16)
P = replace(D, worker_id="p", address="p:1", incarnation="p")
IDLE = FleetView((D,), (P,))
TOKENS = 1025
NO_TARGETS = Targets()


def decide(
    fleet: FleetView,
    tokens: int = TOKENS,
    targets: Targets = NO_TARGETS,
    seed: int = 0,
    forced: Forced = Forced.AUTO,
    **given,
):
    facts = RequestFacts(tokens, **given)
    rng = random.Random(seed)
    return plan(facts, fleet, forced, targets=targets, min_remote_tokens=64, rng=rng)


def ask(tokens: int = TOKENS, now: float = 0.0) -> Ask:
    return Ask(tokens, tokens, NO_TARGETS, now)


def with_d(found: dict[str, int] | None = None, **changes: object) -> FleetView:
    return FleetView((replace(D, **changes),), (P,), {"d": found} if found else {})


def with_p(found: dict[str, int] | None = None, **changes: object) -> FleetView:
    return FleetView((D,), (replace(P, **changes),), {"p": found} if found else {})


@pytest.mark.parametrize(
    ("fleet", "reason"),
    [
        (IDLE, Reason.CHEAPEST_PAIR),
        (with_d(load=9, context_tokens=3000), Reason.CHEAPEST_PAIR),
        (with_d(queued_tokens=4000), Reason.CHEAPEST_PAIR),
        (with_p(queued_tokens=400, waiting=1), Reason.CHEAPEST_PAIR),
        (with_p(queued_tokens=8000, waiting=4), Reason.PREFILL_BUSY),
        (
            FleetView((replace(D, load=9),), (replace(P, queued_tokens=8000, waiting=4),)),
            Reason.CHEAPEST_PAIR,  # those that decode cannot bear it
        ),
        (with_d({"device": 62}), Reason.PREFIX_ON_DECODE),  # 33 tokens are not worth a question
        (with_d({"device": 40}), Reason.PREFIX_ON_DECODE),
        (FleetView((D,), (P,), {"d": {"device": 40}, "p": {"device": 64}}), Reason.CHEAPEST_PAIR),
        (with_d({"host": 40}), Reason.CHEAPEST_PAIR),  # nobody said how fast its host tier is
        (with_d({"host": 40}, tier_token_s={"host": 1e-5}), Reason.PREFIX_ON_DECODE),
        (with_d({"redis": 40}, tier_token_s={"redis": 0.002}), Reason.CHEAPEST_PAIR),
        (with_d(link_nbytes_per_s={"p": 1e7}), Reason.SLOW_TRANSFER),
        (with_d(link_nbytes_per_s={"other": 1e7}), Reason.CHEAPEST_PAIR),
        (with_p(prefill_model=replace(PREFILL, b=0.1)), Reason.CHEAPEST_LOCAL),
        (with_p({"device": 64}, prefill_model=replace(PREFILL, b=0.1)), Reason.CHEAPEST_PAIR),
    ],
)
def test_each_thing_that_makes_a_prompt_stay_or_go(fleet, reason):
    made = decide(fleet)
    assert made.reason is reason
    assert (made.kind is PlanKind.DISAGGREGATED) == (reason is Reason.CHEAPEST_PAIR)


def test_the_parts_of_an_estimate():
    busy = replace(D, load=5, running=4, context_tokens=2000)
    made = decide(FleetView((busy,), (replace(P, queued_tokens=512),)))
    [pair] = [option for option in made.options if option.kind is PlanKind.DISAGGREGATED]
    [local] = [option for option in made.options if option.kind is PlanKind.LOCAL]
    step_s = 0.02 + 4 * 0.002 + 2000e-6
    queue = 2 * 0.01 + 512 * (0.001 + 256e-7)
    assert pair.estimate.wait_s == pytest.approx(queue + step_s / 2), "the way to D is shorter than P's queue"
    compute = 4 * 0.01 + 1024 * (0.001 + 512e-7)
    last = 0.01 + 0.001 + (1024 + 0.5) * 1e-7 + step_s - 0.02
    assert pair.estimate.prefill_s == pytest.approx(compute + last)
    assert pair.estimate.transfer_s == pytest.approx(CALL_S + 256 * 46_080 / 1e9)
    assert pair.estimate.itl_s == pytest.approx(0.02 + 6 * 0.002 + 3025e-6)
    parts = pair.estimate.wait_s, pair.estimate.prefill_s, pair.estimate.transfer_s, pair.estimate.load_s
    assert pair.estimate.ttft_s == pytest.approx(sum(parts))
    whole = 5 * 0.01 + 1025 * (0.001 + 512.5e-7)
    assert local.estimate.prefill_s == pytest.approx(whole + 5 * (step_s - 0.02))
    assert local.estimate.harm_s == pytest.approx(6 * whole)
    assert pair.estimate.harm_s < local.estimate.harm_s
    assert (pair.decode, pair.prefill, local.prefill) == ("d", "p", None)


def test_a_pull_that_computing_cannot_hide_shows():
    def transfer_s(found: dict[str, int], rate: float) -> float:
        made = decide(FleetView((replace(D, link_nbytes_per_s={"p": rate}),), (P,), {"p": found}))
        return next(o.estimate.transfer_s for o in made.options if o.prefill)

    all_s = 1024 * 46_080 / 1e8
    assert transfer_s({"device": 64}, 1e8) == pytest.approx(CALL_S + all_s), "nothing is computed meanwhile"
    computing_s = 4 * 0.01 + 1024 * (0.001 + 512e-7)
    slow_s = 1024 * 46_080 / 2e7
    assert transfer_s({}, 2e7) == pytest.approx(CALL_S + slow_s - computing_s)


@pytest.mark.parametrize(
    ("changes", "tokens", "seconds"),
    [
        ({}, 500, 0.0),
        ({"queued_tokens": 400}, 500, 2 * 0.01 + 400 * (0.001 + 200e-7)),
        (
            {"queued_tokens": 4000, "waiting": 99},
            500,
            16 * 0.01 + 4000 * (0.001 + 250e-7),
        ),  # we are the longest
        ({"queued_tokens": 4000}, 100, 0.01 + 412 * (0.001 + 50e-7)),  # we are the shortest: in one full step
        ({"queued_tokens": 4000}, 300, 2 * 0.01 + (256 + 468) * (0.001 + 150e-7)),  # in three, not two
    ],
)
def test_how_long_a_prompt_waits_for_those_before_it(changes, tokens, seconds):
    assert sum(queue_s(replace(P, **changes), ask(tokens), tokens)) == pytest.approx(seconds)


@pytest.mark.parametrize("queued", [0, 256, 512])
def test_a_decode_worker_is_told_from_how_many_missing_tokens_on_the_pair_is_cheaper(queued):
    """One token fewer, were they found on it after all, and it alone would be."""
    fleet = with_p(queued_tokens=queued, waiting=queued // 512)
    made = decide(fleet)
    assert made.remote is not None
    pair = made.chosen.estimate

    def alone(missing: int) -> float:
        held = FleetView(fleet.decode, (), {"d": {"device": (TOKENS - missing) // 16}})
        return decide(held, forced=Forced.LOCAL).chosen.estimate.cost_s

    least = made.remote.min_tokens
    assert 64 <= least <= 1024
    assert alone(least + 100) > pair.cost_s
    assert least == 64 or alone(least - 100) < pair.cost_s
    if queued == 512:
        assert least > 600
    assert made.remote.queue_s == pytest.approx(sum(queue_s(fleet.prefill[0], ask(), 1024)))
    assert made.remote.token_s == pytest.approx(PREFILL.prompt_seconds(1024, 0, 256) / 1024)


def test_what_a_decode_worker_asks_for_whatever_it_costs():
    slow = with_d(link_nbytes_per_s={"p": 1e7})
    made = decide(slow, forced=Forced.DISAGGREGATED)
    assert made.remote is not None
    assert made.remote.min_tokens == 1, "a client wants it so"
    quick = with_d(link_nbytes_per_s={"p": 2e7}, prefill_model=replace(PREFILL, b=0.004))
    made = decide(quick, targets=Targets(ttft_s=3.0))
    assert made.remote is not None
    assert made.remote.min_tokens <= 1024
    assert decide(slow).remote is None


def test_what_of_a_step_is_over_is_not_waited_for():
    busy = replace(P, queued_tokens=400, waiting=1, step_began_at=7.0)
    first_s, second_s = 0.01 + 256 * (0.001 + 200e-7), 0.01 + 144 * (0.001 + 200e-7)
    for now, present_s in ((7.0, first_s), (7.1, first_s - 0.1), (9.0, 0.0)):
        assert queue_s(busy, ask(1000, now), 1000) == pytest.approx((present_s, second_s))
    beside = queue_s(replace(busy, running=3), ask(1000, 7.0), 1000, beside_s=0.02)
    assert beside == pytest.approx((first_s + 0.02, second_s + 0.02)), "decoding shares each step"
    assert queue_s(replace(D, running=3), ask(), 1000, beside_s=0.006) == pytest.approx((0.026 / 2, 0.0))


def test_a_full_batch_is_waited_for_and_another_worker_is_not():
    assert slot_s(replace(D, load=15), 0.1) == 0
    assert slot_s(replace(D, load=16), 0.1) == pytest.approx(128 * 0.1 / 16)
    assert slot_s(replace(D, load=16, max_num_seqs=0), 0.1) == 0
    slow = replace(D, worker_id="slow", incarnation="s", decode_model=replace(DECODE, b=0.01))
    assert decide(FleetView((replace(D, load=16), slow))).decode == slow
    assert decide(FleetView((replace(D, load=0), slow))).decode.worker_id == "d"


@pytest.mark.parametrize(
    ("found", "tiers", "expected"),
    [
        ({}, {}, (0, 0.0)),
        ({"device": 4}, {}, (64, 0.0)),
        ({"device": 2, "host": 2}, {"host": 0.0001}, (64, 0.0032)),
        ({"device": 2, "host": 2, "disk": 1}, {"disk": 0.0001}, (32, 0.0)),  # the host's speed is not known
        ({"host": 1, "disk": 1, "redis": 1}, {"host": 0.0, "disk": 0.0005, "redis": 0.002}, (32, 0.008)),
        ({"device": 9, "host": 9}, {"host": 0.0001}, (160, 0.0016)),  # 160 may come from elsewhere
    ],
)
def test_what_a_hit_spares(found, tiers, expected):
    tokens, seconds = spared(replace(D, tier_token_s=tiers), found, 0.001, 160)
    assert (tokens, seconds) == (expected[0], pytest.approx(expected[1]))


@pytest.mark.parametrize(
    ("targets", "decode", "prefill", "reason"),
    [
        (Targets(), "d", "p", Reason.CHEAPEST_PAIR),
        (Targets(ttft_s=2.0), "d", "p", Reason.CHEAPEST_PAIR),
        (Targets(itl_s=0.04), "idle", "p", Reason.KEEPS_TARGETS),
        (Targets(ttft_s=0.5, itl_s=0.04), "idle", None, Reason.MISSES_TARGETS),
        (Targets(ttft_s=0.01), "idle", None, Reason.MISSES_TARGETS),
    ],
)
def test_targets_pass_over_the_cheapest(targets, decode, prefill, reason):
    """`d` is nearer to `p`; `idle` alone decodes fast, and alone is the sooner one to answer."""
    near = replace(D, load=6, context_tokens=9000, link_nbytes_per_s={"p": 1e10})
    idle = replace(D, worker_id="idle", incarnation="i", link_nbytes_per_s={"p": 5e7})
    made = decide(
        FleetView((near, idle), (replace(P, prefill_model=replace(PREFILL, b=0.0004)),)), targets=targets
    )
    got = made.decode.worker_id, made.prefill and made.prefill.worker_id, made.reason
    if targets == Targets():
        assert made.chosen is made.options[0]
    if reason is Reason.MISSES_TARGETS:
        assert not any(option.estimate.meets for option in made.options)
        assert made.reason is reason
        return
    assert got == (decode, prefill, reason)
    assert made.chosen.estimate.meets


def test_work_that_no_state_shows_yet_counts():
    fleet = IDLE
    kinds = []
    for _ in range(12):
        made = decide(fleet)
        kinds.append(made.kind)
        fleet = fleet.given(made.work)
    assert kinds[0] is PlanKind.DISAGGREGATED
    assert PlanKind.LOCAL in kinds, "the queue at the one prefill worker grows"


def test_of_equal_pairs_any():
    """Also where more are equal than are tried in pairs."""
    decodes = tuple(replace(D, worker_id=f"d{i}", incarnation=f"d{i}") for i in range(2 * MAX_PAIRED))
    prefills = tuple(replace(P, worker_id=f"p{i}", incarnation=f"p{i}") for i in range(2 * MAX_PAIRED))
    made = [decide(FleetView(decodes, prefills), seed=seed) for seed in range(400)]
    for workers in (
        Counter(each.decode.worker_id for each in made),
        Counter(each.prefill.worker_id for each in made if each.prefill),
    ):
        assert (workers.total(), len(workers)) == (400, 2 * MAX_PAIRED)
        assert min(workers.values()) > 20


@pytest.mark.parametrize(
    ("dtype", "nbytes"), [("fp32", 46_080), ("int8", 11_880), ("int8/skip=0,29", 12_624)]
)
def test_bytes_of_a_token(dtype, nbytes):
    assert token_nbytes(replace(PRINT, kv_dtype=dtype)) == nbytes


workers = st.builds(
    lambda number, load, queued, context, blocks, odd, b, full: WorkerView(
        f"w{number}",
        f"w{number}:1",
        f"{number}",
        replace(PRINT, block_size=32) if odd else PRINT,
        blocks,
        load=load,
        waiting=load // 2,
        queued_tokens=queued,
        context_tokens=context,
        max_num_seqs=full,
        prefill_model=StepModel(0.01, b, 1e-7, 1),
    ),
    st.integers(0, 10**6),
    st.integers(0, 40),
    st.integers(0, 20_000),
    st.integers(0, 50_000),
    st.sampled_from([4, 64, 512]),
    st.booleans(),
    st.floats(1e-5, 1e-2),
    st.sampled_from([0, 1, 16]),
)
tiers = st.dictionaries(st.sampled_from(["device", "host", "disk"]), st.integers(1, 40))


@given(
    st.lists(workers, min_size=1, max_size=12, unique_by=lambda w: w.incarnation),
    st.lists(workers, max_size=12, unique_by=lambda w: w.incarnation),
    st.integers(1, 2000),
    st.sampled_from(list(Forced)),
    st.builds(Targets, st.sampled_from([0.0, 0.1, 3.0]), st.sampled_from([0.0, 0.03, 0.2])),
    st.lists(tiers, min_size=24, max_size=24),
    st.integers(0, 200),
)
def test_whatever_the_fleet_a_plan_can_be_served_and_is_the_best(
    decodes, prefills, tokens, forced, targets, found, min_remote_tokens
):
    decodes = [replace(each, fingerprint=PRINT) for each in decodes]  # a fleet has one of its own
    prefills = [replace(each, incarnation=f"p{each.incarnation}") for each in prefills]
    held = {each.incarnation: tier for each, tier in zip((*decodes, *prefills), found, strict=False)}
    fleet = FleetView(tuple(decodes), tuple(prefills), held)
    try:
        made = plan(
            RequestFacts(tokens),
            fleet,
            forced,
            targets=targets,
            min_remote_tokens=min_remote_tokens,
            rng=random.Random(0),
        )
    except BatonError:
        assert forced is Forced.DISAGGREGATED or all(each.max_tokens <= tokens for each in decodes)
        return
    assert made.decode in fleet.decode
    assert made.decode.max_tokens > tokens
    assert 1 <= made.max_tokens <= made.decode.max_tokens - tokens
    if made.prefill is not None:
        assert made.prefill in fleet.prefill
        assert made.prefill.fingerprint == made.decode.fingerprint
        assert made.prefill.total_blocks * 16 >= (tokens - 1) // 16 * 16
        assert forced is not Forced.LOCAL
    assert (made.kind is PlanKind.LOCAL) == (made.prefill is None)
    assert made.chosen in made.options
    assert len(made.options) <= MAX_OPTIONS
    assert sum(sent.tokens for sent in made.work.values()) <= tokens
    assert made.work[made.decode.incarnation].sequences == 1
    assert all(isinstance(sent, Sent) and sent.tokens >= 0 for sent in made.work.values())
    for option in made.options:
        assert option.estimate.ttft_s > 0
        assert option.estimate.cost_s >= option.estimate.ttft_s
    if forced is Forced.AUTO:
        assert made.options[0] is made.chosen
        meeting = [option for option in made.options if option.estimate.meets]
        if meeting:
            assert made.chosen.estimate.cost_s == min(option.estimate.cost_s for option in meeting)
