import pytest

from core.clock import FakeClock
from kvtransfer.breaker import BASE_S, CAP_S, Breaker, Verdict, back_off_s

GO, PROBE, REFUSE = Verdict.GO, Verdict.PROBE, Verdict.REFUSE


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock(100.0)


@pytest.fixture
def breaker(clock: FakeClock) -> Breaker:
    return Breaker(clock, spread=lambda: 1.0)


@pytest.mark.parametrize(
    ("streak", "spread", "expected"),
    [
        (1, 1.0, 0.5),
        (2, 1.0, 1.0),
        (5, 1.0, 8.0),
        (7, 1.0, CAP_S),
        (10_000, 1.0, CAP_S),
        (1, 0.0, 0.25),
        (7, 0.0, CAP_S / 2),
        (2, 0.5, 0.75),
    ],
)
def test_back_off(streak: int, spread: float, expected: float) -> None:
    assert back_off_s(streak, spread) == pytest.approx(expected)


# Each story: (what happens, state after it); numbers let that many seconds pass.
STORIES: dict[str, list[tuple[object, object, str]]] = {
    "success changes nothing": [
        ("admit", GO, "closed"),
        ("succeeded", False, "closed"),
        ("admit", GO, "closed"),
    ],
    "one failure opens, the rest is refused": [
        ("failed", True, "open"),
        ("admit", REFUSE, "open"),
        (BASE_S / 2, None, "open"),
        ("admit", REFUSE, "open"),
    ],
    "one probe at a time": [
        ("failed", True, "open"),
        (BASE_S, None, "open"),
        ("admit", PROBE, "half-open"),
        ("admit", REFUSE, "half-open"),
        ("succeeded", True, "closed"),
        ("admit", GO, "closed"),
    ],
    "a failed probe waits twice as long": [
        ("failed", True, "open"),
        (BASE_S, None, "open"),
        ("admit", PROBE, "half-open"),
        ("failed", False, "open"),
        (BASE_S, None, "open"),
        ("admit", REFUSE, "open"),
        (BASE_S, None, "open"),
        ("admit", PROBE, "half-open"),
    ],
    "results of operations from before it opened change nothing": [
        ("failed", True, "open"),
        ("failed", False, "open"),
        ("succeeded", False, "open"),
        (BASE_S, None, "open"),
        ("admit", PROBE, "half-open"),
    ],
    "a cancelled probe says nothing": [
        ("failed", True, "open"),
        (BASE_S, None, "open"),
        ("admit", PROBE, "half-open"),
        ("cancelled", None, "open"),
        ("admit", PROBE, "half-open"),
        ("succeeded", True, "closed"),
        ("cancelled", None, "closed"),
        ("admit", GO, "closed"),
    ],
    "a relapse continues the back-off": [
        ("failed", True, "open"),
        (BASE_S, None, "open"),
        ("admit", PROBE, "half-open"),
        ("succeeded", True, "closed"),
        (CAP_S / 2, None, "closed"),
        ("failed", True, "open"),
        (BASE_S, None, "open"),
        ("admit", REFUSE, "open"),
        (BASE_S, None, "open"),
        ("admit", PROBE, "half-open"),
    ],
    "health forgets": [
        ("failed", True, "open"),
        (BASE_S, None, "open"),
        ("admit", PROBE, "half-open"),
        ("succeeded", True, "closed"),
        (CAP_S, None, "closed"),
        ("failed", True, "open"),
        (BASE_S, None, "open"),
        ("admit", PROBE, "half-open"),
    ],
}


@pytest.mark.parametrize("story", STORIES.values(), ids=STORIES)
def test_stories(story: list[tuple[object, object, str]], breaker: Breaker, clock: FakeClock) -> None:
    for event, expected, state in story:
        if isinstance(event, float):
            clock.advance(event)
        else:
            assert getattr(breaker, str(event))() == expected, event
        assert breaker.state == state, event


def test_refuses_says_what_admit_would_and_changes_nothing(breaker: Breaker, clock: FakeClock) -> None:
    assert not breaker.refuses
    breaker.failed()
    assert breaker.refuses
    clock.advance(BASE_S)
    assert not breaker.refuses
    assert breaker.state == "open"
    breaker.admit()
    assert breaker.refuses
