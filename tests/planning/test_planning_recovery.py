"""Whether a request goes on elsewhere, as tables: what it has met in, the decision out."""

from __future__ import annotations

from math import inf

import pytest
from hypothesis import given
from hypothesis import strategies as st

from core.errors import (
    BatonError,
    ContextLengthExceeded,
    EngineFault,
    InvalidParameter,
    Overloaded,
    RequestPoisoned,
    Unavailable,
    WorkerLost,
)
from planning.recovery import (
    AVOID_S,
    PROGRESS_TOKENS,
    Cause,
    Denial,
    Tries,
    after,
    cause_of,
    denial,
    is_suspect,
    is_worth_waiting,
)
from planning.retry_budget import FLOOR, SHARE, WINDOW_S, RetryBudget

FEW, MANY = PROGRESS_TOKENS - 1, PROGRESS_TOKENS
DIED, SILENT, LEFT, FAULT = Cause.DIED, Cause.SILENT, Cause.LEFT, Cause.FAULT


def met(*tries: tuple[str, Cause, int]) -> Tries:
    """After these: (worker's life, why it ended, tokens that it brought)."""
    so_far = Tries()
    for now, (life, cause, tokens) in enumerate(tries):
        so_far = after(so_far, life, cause, tokens, float(now))
    return so_far


@pytest.mark.parametrize(
    ("error", "cause"),
    [
        (WorkerLost("x"), DIED),
        (EngineFault("x"), FAULT),
        (Unavailable("x"), Cause.UNAVAILABLE),
        (Overloaded("x"), Cause.BUSY),
        (InvalidParameter("x"), None),
        (ContextLengthExceeded("x"), None),
        (BatonError("x"), None),
    ],
)
def test_what_a_failure_means(error: BatonError, cause: Cause | None) -> None:
    assert cause_of(error) is cause
    assert isinstance(RequestPoisoned("x"), EngineFault)


@pytest.mark.parametrize(
    ("tries", "alive", "why_not"),
    [
        pytest.param([("a", DIED, 5)], [], None, id="one-death"),
        pytest.param([("a", DIED, 5), ("b", DIED, 0)], [], Denial.POISONED, id="two-deaths"),
        pytest.param([("a", DIED, 500), ("b", DIED, 0)], [], Denial.POISONED, id="at-the-same-token"),
        pytest.param([("a", DIED, 0), ("b", SILENT, FEW)], [], Denial.POISONED, id="a-death-and-a-hang"),
        pytest.param([("a", FAULT, 0), ("b", FAULT, 0)], ["a", "b"], Denial.POISONED, id="two-faults"),
        pytest.param([("a", FAULT, 0), ("b", DIED, 0)], ["a"], Denial.POISONED, id="a-fault-and-a-death"),
        pytest.param([("a", FAULT, 0), ("a", DIED, 0)], [], None, id="one-worker-twice"),
        pytest.param([("a", DIED, 0), ("a", DIED, 0)], [], None, id="one-life-lost-twice"),
        pytest.param([("a", DIED, 0), ("b", DIED, MANY)], [], None, id="it-got-on-before-the-second"),
        pytest.param(
            [("a", DIED, 0), ("b", DIED, MANY), ("c", DIED, FEW)], [], Denial.POISONED, id="not-since"
        ),
        pytest.param(
            [("a", DIED, 0), ("b", LEFT, MANY), ("c", DIED, 0)], [], None, id="got-on-where-drained"
        ),
        pytest.param([("a", DIED, 0), ("b", DIED, 0)], ["a"], None, id="the-first-was-only-cut-off"),
        pytest.param([("a", SILENT, 0), ("b", SILENT, 0)], ["a"], None, id="the-first-was-only-stopped"),
        pytest.param(
            [("a", LEFT, 0), ("b", Cause.BUSY, 0), ("c", Cause.UNAVAILABLE, 0)], [], None, id="none-died"
        ),
        pytest.param([(life, LEFT, 0) for life in "abcd"], [], Denial.LIMIT, id="more-than-its-share"),
        pytest.param([(life, DIED, MANY) for life in "abcd"], [], Denial.LIMIT, id="also-when-it-gets-on"),
    ],
)
def test_who_goes_on(tries: list[tuple[str, Cause, int]], alive: list[str], why_not: Denial | None) -> None:
    been = met(*tries)
    assert is_suspect(been, alive) == (why_not is Denial.POISONED)
    if why_not is not Denial.POISONED:
        assert denial(been, max_resumes=3) is why_not


def test_two_faults_need_no_second_look() -> None:
    assert denial(met(("a", FAULT, 0), ("b", FAULT, 0)), max_resumes=3) is Denial.POISONED
    assert denial(met(("a", FAULT, 0), ("b", DIED, 0)), max_resumes=3) is None


def test_no_resumes_at_all() -> None:
    assert denial(met(("a", DIED, 0)), max_resumes=0) is Denial.LIMIT


def test_where_it_is_not_sent_again() -> None:
    been = met(("cut", DIED, 0), ("faulty", FAULT, 0), ("full", Cause.BUSY, 0))
    assert been.avoid == {"cut": AVOID_S, "faulty": inf, "full": 2 + AVOID_S}
    assert been.avoided(0.5) == {"cut", "faulty", "full"}
    assert been.avoided(1.0) == {"faulty", "full"}
    assert been.avoided(1e9) == {"faulty"}
    assert been.resumes == 3


@pytest.mark.parametrize(
    ("cause", "has_tokens", "others_expected", "waits"),
    [
        (DIED, False, False, True),
        (SILENT, True, False, True),
        (LEFT, False, False, True),
        (FAULT, True, False, False),
        (FAULT, True, True, True),
        (Cause.UNAVAILABLE, False, False, False),
        (Cause.UNAVAILABLE, False, True, True),
        (Cause.UNAVAILABLE, True, False, True),
        (Cause.BUSY, False, True, False),
        (Cause.BUSY, True, False, True),
    ],
)
def test_who_waits_for_a_worker(cause: Cause, has_tokens: bool, others_expected: bool, waits: bool) -> None:
    assert is_worth_waiting(cause, has_tokens, others_expected) is waits


# ---- the budget of all


def test_a_floor_and_a_share_of_the_last_minute() -> None:
    budget = RetryBudget()
    assert [budget.spend(0.0) for _ in range(FLOOR + 1)] == [True] * FLOOR + [False]
    for _ in range(100):
        budget.began(30.0)
    more = round(SHARE * 100)
    assert [budget.spend(31.0) for _ in range(more + 1)] == [True] * more + [False]
    assert [budget.spend(WINDOW_S + 0.5) for _ in range(FLOOR + 1)] == [True] * FLOOR + [False], (
        "the first ten"
    )
    assert [budget.spend(WINDOW_S * 3.0) for _ in range(FLOOR + 1)] == [True] * FLOOR + [False]


@given(st.lists(st.tuples(st.floats(0, 3), st.booleans()), max_size=300))
def test_no_minute_has_more_than_that(steps: list[tuple[float, bool]]) -> None:
    budget, now, requests, retries = RetryBudget(), 0.0, [], []
    for passed, is_request in steps:
        now += passed
        if is_request:
            budget.began(now)
            requests.append(now)
        elif budget.spend(now):
            retries.append(now)
        else:
            lately = sum(at > now - WINDOW_S for at in requests)
            assert sum(at > now - WINDOW_S - 1 for at in retries) >= FLOOR + SHARE * lately
        # Whole seconds are dropped together, up to one second late.
        recent = sum(at > now - WINDOW_S + 1 for at in retries)
        assert recent <= FLOOR + 1 + SHARE * sum(at > now - 2 * WINDOW_S for at in requests)
