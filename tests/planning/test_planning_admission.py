"""Now, later or not at all: decisions as tables, counts that come back to nothing (E3, E6)."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from planning.admission import Admit, Bounds, Refusal, Refuse, Wait, WaitingRoom
from planning.fair_queue import Share, Ticket
from planning.key_limits import KeyLimits

A, B = Share("a"), Share("b")


def room_of(**bounds: float) -> WaitingRoom:
    given = {"max_requests": 100, "max_waiting": 3, "queue_timeout_s": 60.0, "slo_factor": 3.0} | bounds
    return WaitingRoom(Bounds(**given))  # type: ignore[arg-type]


def paced(room: WaitingRoom, tokens_per_s: float) -> None:
    """Let the room see at which pace those that wait are let in."""
    for number in (-1, -2):
        room.arrive(Ticket(number, A, 0, round(tokens_per_s)), 0, 0.0)
    for second in (1.0, 2.0):
        (ticket,) = room.take(1, second)
        room.leave(ticket, 0)


def test_with_room_nobody_waits_and_without_it_everybody():
    room = room_of()
    assert room.arrive(Ticket(1, A, 0, 10, 4), 0.5, 0.0) == Admit()
    assert room.num_running_sequences == 4
    assert isinstance(room.arrive(Ticket(2, A, 0, 10), 0, 0.0), Wait)
    assert isinstance(room.arrive(Ticket(3, A, 0, 10), 9, 0.0), Wait), "nobody overtakes"
    assert (room.num_waiting, room.num_running_sequences) == (2, 4)
    assert [t.number for t in room.take(1, 1.0)] == [2]
    assert room.take(0, 1.0) == []
    assert [t.number for t in room.take(9, 1.0)] == [3]


def test_a_request_of_many_sequences_goes_when_there_is_room_for_one():
    room = room_of()
    for number, sequences in ((1, 8), (2, 1)):
        room.arrive(Ticket(number, A, 0, 10, sequences), 0, 0.0)
    assert [t.number for t in room.take(1, 1.0)] == [1]
    assert room.take(1 - 8, 1.0) == []


def test_a_full_room_turns_away_whom_it_owes_least():
    room = room_of(max_waiting=2)
    first, second = Ticket(1, A, 0, 10), Ticket(2, A, 0, 10)
    for ticket in (first, second):
        room.arrive(ticket, 0, 0.0)
    assert room.arrive(Ticket(3, A, 0, 10), 0, 0.0) == Refuse(Refusal.QUEUE_FULL, 1.0)
    shared = room.arrive(Ticket(4, B, 0, 10), 0, 0.0)
    assert isinstance(shared, Wait)
    assert shared.displaced == second
    urgent = room.arrive(Ticket(5, A, -1, 10), 0, 0.0)
    assert isinstance(urgent, Wait)
    assert urgent.displaced is not None
    assert room.num_waiting == 2
    assert next(t.number for t in room.take(9, 0.0)) == 5


def test_no_room_at_all_to_wait():
    assert room_of(max_waiting=0).arrive(Ticket(1, A, 0, 10), 0, 0.0) == Refuse(Refusal.QUEUE_FULL, 1.0)
    assert room_of(max_waiting=0).arrive(Ticket(1, A, 0, 10), 1, 0.0) == Admit()


@pytest.mark.parametrize(
    ("max_requests", "concurrent", "entered", "reason"),
    [
        (2, 0, 2, Refusal.BUSY),
        (9, 3, 3, Refusal.KEY_CONCURRENCY),
        (9, 0, 5, None),
    ],
)
def test_how_many_may_enter(max_requests, concurrent, entered, reason):
    room, share = room_of(max_requests=max_requests), Share("a", max_concurrent=concurrent)
    assert [room.enter(share, 0.0) for _ in range(entered)] == [None] * entered
    refused = room.enter(share, 0.0)
    assert (refused and refused.reason) == reason
    room.exit(share)
    assert room.enter(share, 0.0) is None


@pytest.mark.parametrize(
    ("room", "before", "ttft_s", "slo_s", "factor", "decision"),
    [
        (1, 0, 2.9, 1.0, 3.0, Admit()),
        (1, 0, 3.1, 1.0, 3.0, Refuse(Refusal.TTFT_SLO, pytest.approx(2.1))),
        (1, 0, 3.1, 1.0, 0.0, Admit()),
        (1, 0, 3.1, 0.0, 3.0, Admit()),
        (1, 0, 90.0, 1.0, 3.0, Refuse(Refusal.TTFT_SLO, 60.0)),
        (0, 0, 1.0, 1.0, 3.0, Wait(0.0, 2.0, Refusal.TTFT_SLO)),
        (0, 2, 1.0, 2.0, 3.0, Wait(pytest.approx(2.0), 5.0, Refusal.TTFT_SLO)),  # type: ignore[arg-type]
        (0, 2, 5.0, 2.0, 3.0, Refuse(Refusal.TTFT_SLO, pytest.approx(5.0))),
        (0, 2, 0.0, 0.1, 3.0, Refuse(Refusal.TTFT_SLO, pytest.approx(1.9))),
        (0, 2, 1.0, 30.0, 3.0, Wait(pytest.approx(2.0), 60.0, Refusal.QUEUE_TIMEOUT)),  # type: ignore[arg-type]
    ],
)
def test_a_target_that_would_be_missed_by_far_is_a_no(room, before, ttft_s, slo_s, factor, decision):
    """`before` seconds' worth of requests wait already; 100 tokens a second are let in."""
    waiting = room_of(max_waiting=20, slo_factor=factor)
    paced(waiting, 100)
    for number in range(before):
        waiting.arrive(Ticket(number, A, 0, 100), 0, 10.0)
    counts = waiting.num_waiting, waiting.num_running_sequences
    made = waiting.arrive(Ticket(99, A, 0, 100), room, 10.0, ttft_s=ttft_s, ttft_slo_s=slo_s)
    assert made == decision
    if isinstance(decision, Refuse):
        assert (waiting.num_waiting, waiting.num_running_sequences) == counts


def test_who_waits_longer_when_the_room_is_fuller():
    waiting = room_of(max_waiting=200)
    paced(waiting, 100)
    expected = []
    for number in range(20):
        made = waiting.arrive(Ticket(number, A, 0, 50), 0, 10.0)
        assert isinstance(made, Wait)
        expected.append(made.expected_s)
    assert expected == pytest.approx([number / 2 for number in range(20)])
    other = waiting.arrive(Ticket(50, B, 0, 50), 0, 10.0)
    assert isinstance(other, Wait)
    assert other.expected_s == pytest.approx(0.5), "another key's line is its own"
    assert waiting.full().retry_after_s == pytest.approx(21 * 50 / 100 / 2)


def test_tokens_a_minute():
    """600 a minute are 10 a second."""
    limits, share = KeyLimits(), Share("a", max_tokens_per_minute=600)
    assert limits.charge(share, 500, 0.0) == 0
    assert limits.charge(share, 200, 0.0) == pytest.approx(10.0)
    assert limits.charge(share, 200, 9.9) > 0
    assert limits.charge(share, 200, 10.0) == 0
    limits.refund(share, 150)
    assert limits.charge(share, 150, 10.0) == 0
    assert limits.charge(share, 600, 70.0) == 0, "a minute fills it, no more than to the brim"
    assert limits.charge(share, 1, 70.0) == pytest.approx(0.1)
    assert limits.charge(Share("b"), 10**9, 0.0) == 0


def test_a_request_dearer_than_a_minute_goes_when_the_bucket_is_full():
    limits, share = KeyLimits(), Share("a", max_tokens_per_minute=600)
    assert limits.charge(share, 100, 0.0) == 0
    assert limits.charge(share, 6000, 0.0) == pytest.approx(10.0)
    assert limits.charge(share, 6000, 10.0) == 0
    assert limits.charge(share, 100, 10.0) == pytest.approx((5400 + 100) / 10)


def test_what_a_request_did_not_use_is_given_back():
    room, share = room_of(), Share("a", max_tokens_per_minute=600)
    ticket = Ticket(1, share, 0, 600)
    assert room.arrive(ticket, 1, 0.0) == Admit()
    late = room.arrive(Ticket(2, share, 0, 500), 1, 0.0)
    assert late == Refuse(Refusal.KEY_TOKENS, pytest.approx(50.0))
    room.leave(ticket, used_tokens=50)
    assert room.arrive(Ticket(3, share, 0, 500), 1, 0.0) == Admit()


def test_an_answer_without_a_limit_is_expected_to_be_as_others_were():
    room = room_of()
    assert [room.answer_tokens(limit, 8000) for limit in (7, None, 9000)] == [7, 256, 8000]
    for _ in range(1000):
        room.answered(40)
    assert room.answer_tokens(None, 8000) == 40
    assert room.answer_tokens(None, 8) == 8


lives = st.lists(
    st.tuples(st.sampled_from([0, 1, 2]), st.integers(-3, 3), st.integers(1, 3000), st.integers(1, 8)),
    max_size=80,
)


@given(lives, st.integers(0, 2**32))
@settings(max_examples=150, deadline=None)
def test_all_counts_come_back_to_nothing(lives, seed):
    """Whatever happens to whom, in any order: admitted, refused, displaced, gone while it waits or runs."""
    shares = [Share("a"), Share("b", 2.0, max_concurrent=5), Share("c", max_tokens_per_minute=9000)]
    rng, now = random.Random(seed), 0.0
    room = room_of(max_requests=30, max_waiting=6)
    inside: dict[int, Ticket] = {}

    def out(ticket: Ticket) -> None:
        del inside[ticket.number]
        for _ in range(rng.choice([1, 2])):  # leaving twice changes nothing
            room.leave(ticket, rng.randrange(ticket.cost_tokens + 1))
        room.exit(ticket.share)

    for number, (key, priority, cost, sequences) in enumerate(lives):
        now += rng.random()
        share = shares[key]
        if room.enter(share, now) is not None:
            continue
        ticket = inside[number] = Ticket(number, share, priority, cost, sequences)
        made = room.arrive(
            ticket, rng.randint(-5, 5), now, ttft_s=rng.random(), ttft_slo_s=rng.choice([0, 0.1, 5])
        )
        if isinstance(made, Refuse):
            out(ticket)
        elif isinstance(made, Wait) and made.displaced is not None:
            out(made.displaced)
        for _ in range(rng.randrange(3)):
            room.take(rng.randint(0, 3), now)
            if inside and rng.random() < 0.7:
                out(rng.choice(list(inside.values())))
        assert room.num_requests == len(inside)
        assert room.num_waiting <= 6
    for ticket in list(inside.values()):
        out(ticket)
    assert (room.num_requests, room.num_waiting, room.num_running_sequences) == (0, 0, 0)
    assert room.take(99, now) == []


def test_after_a_pause_a_minute_sees_up_to_twice_the_limit_and_later_ones_the_limit():
    limits, share = KeyLimits(), Share("a", max_tokens_per_minute=600)
    granted = [0, 0, 0]
    for tenth in range(1800):
        while limits.charge(share, 10, tenth / 10) == 0:
            granted[tenth // 600] += 10
    assert granted == pytest.approx([1200, 600, 600], abs=20)


def test_a_key_that_is_given_a_limit_while_it_is_used_begins_with_a_full_bucket():
    limits, free, limited = KeyLimits(), Share("a"), Share("a", max_tokens_per_minute=600)
    for second in (0.0, 5.0):
        assert limits.enter(free, second)
    assert limits.enter(limited, 5.1)
    assert limits.charge(limited, 600, 5.1) == 0
    assert limits.charge(limited, 60, 5.1) == pytest.approx(6.0)
    wider = Share("a", max_tokens_per_minute=6000)
    assert limits.charge(wider, 60, 5.1) > 0, "a new limit gives no tokens, but for where there was none"
