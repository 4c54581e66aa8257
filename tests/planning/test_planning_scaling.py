"""How many workers the pools should have, as tables and as laws; and that the manifests know the same numbers."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from planning.scaling import (
    BACKLOG_S,
    PERIOD_S,
    SHRINK_EVERY_S,
    WINDOW_S,
    DecodeLoad,
    Load,
    Past,
    Pool,
    PrefillLoad,
    Worker,
    leaving,
    scaling,
    wanted,
)

IDLE = PrefillLoad(0.0)


def pool(replicas: int, ready: int | None = None, least: int = 1, most: int = 8) -> Pool:
    return Pool(replicas, replicas if ready is None else ready, least, most)


@pytest.mark.parametrize(
    ("load", "of", "expected"),
    [
        (PrefillLoad(0.0), pool(3), 1),
        (PrefillLoad(3.0), pool(1), 2),
        (PrefillLoad(12.0), pool(2), 6),
        (PrefillLoad(100.0), pool(2), 8),  # at most
        (PrefillLoad(6.5), pool(3), 3),  # 8% more than planned: nothing to be done
        (PrefillLoad(6.7), pool(3), 4),
        (PrefillLoad(0.0, ttft_pressure=1.5), pool(4), 6),
        (PrefillLoad(0.0, ttft_pressure=1.09), pool(4), 4),
        (PrefillLoad(0.0, ttft_pressure=0.5), pool(4), 2),
        (PrefillLoad(0.0, ttft_pressure=2.0), pool(6, ready=3), 6),  # the slow ones are the three
        (PrefillLoad(0.0, ttft_pressure=2.0), pool(6, ready=0), 1),
        (PrefillLoad(10.0, ttft_pressure=0.1), pool(2), 5),
        (DecodeLoad(0.0, 0, 64), pool(3, least=2), 2),
        (DecodeLoad(1.6, 10, 64), pool(2), 2),
        (DecodeLoad(1.7, 10, 64), pool(2), 3),
        (DecodeLoad(0.5, 200, 64), pool(4), 4),
        (DecodeLoad(0.5, 230, 64), pool(4), 5),
        (DecodeLoad(0.5, 10, 64, itl_pressure=1.3), pool(3), 4),
    ],
)
def test_what_a_load_is_right_for(load: Load, of: Pool, expected: int):
    assert wanted(load, of) == expected


def replay(loads: Sequence[tuple[float, Load]], size: int, most: int = 8) -> list[tuple[float, int]]:
    """The sizes, after each decision; all workers are ready at once."""
    past, sizes = Past(), []
    for now, load in loads:
        size, past = scaling(load, pool(size, most=most), past, now)
        sizes.append((now, size))
    return sizes


def steady(load: Load, begin: float, end: float) -> list[tuple[float, Load]]:
    return [(begin + PERIOD_S * i, load) for i in range(int((end - begin) / PERIOD_S))]


def changes(sizes: list[tuple[float, int]], first: int) -> list[tuple[float, int]]:
    before = [first, *(size for _, size in sizes)]
    return [(at, size) for (at, size), old in zip(sizes, before, strict=False) if size != old]


def test_it_doubles_at_most_until_it_has_what_it_wants():
    sizes = replay(steady(PrefillLoad(7 * BACKLOG_S), 0, 100), 1)
    assert changes(sizes, 1) == [(0, 2), (15, 4), (30, 7)]


def test_a_host_that_asks_more_often_grows_no_faster():
    sizes = replay([(float(second), PrefillLoad(100.0)) for second in range(60)], 1)
    assert changes(sizes, 1) == [(0, 2), (15, 4), (30, 8)]


def test_it_shrinks_one_by_one_after_a_quiet_window():
    sizes = replay(steady(PrefillLoad(4 * BACKLOG_S), 0, 60) + steady(IDLE, 60, 3600), 4)
    first = 45 + WINDOW_S  # the last time that four were wanted
    assert changes(sizes, 4) == [(first + 15 + i * SHRINK_EVERY_S, 3 - i) for i in range(3)]


def test_a_burst_within_the_window_keeps_what_it_needed():
    loads = [(now, PrefillLoad(10.0) if now % 900 == 0 else IDLE) for now, _ in steady(IDLE, 0, 7200)]
    assert changes(replay(loads, 1), 1) == [(0, 2), (900, 4), (1800, 5)]


def test_a_scaler_that_has_just_begun_shrinks_nothing():
    assert changes(replay(steady(IDLE, 0, WINDOW_S), 4), 4) == []


def test_growth_right_after_shrinking_is_not_held_back():
    loads = [*steady(IDLE, 0, WINDOW_S + PERIOD_S), (WINDOW_S + PERIOD_S, PrefillLoad(8 * BACKLOG_S))]
    sizes = replay(loads, 4)
    assert [size for _, size in sizes[-3:]] == [4, 3, 6]


@pytest.mark.parametrize(("size", "expected"), [(0, 2), (1, 2), (9, 6)])
def test_bounds_that_were_changed_hold_at_once(size: int, expected: int):
    assert scaling(IDLE, Pool(size, size, 2, 6), Past(), 0.0)[0] == expected


loads = st.builds(PrefillLoad, st.floats(0, 60), st.floats(0, 4)) | st.builds(
    DecodeLoad, st.floats(0, 8), st.floats(0, 500), st.just(64), st.floats(0, 4)
)


@given(st.lists(st.tuples(st.floats(1, 400), loads), min_size=1, max_size=120), st.integers(1, 8))
def test_it_never_flaps(told: list[tuple[float, Load]], size: int):
    """Under any load, asked at any times: within bounds, down by one at a time, and in 20 minutes at most two
    turns; nothing that it remembers grows without end."""
    now, past, first = 0.0, Past(), size
    sizes = []
    for pause, load in told:
        now += pause
        size, past = scaling(load, pool(size), past, now)
        sizes.append((now, size))
        assert len(past.wanted) <= WINDOW_S + 2
        assert past.wanted[-1][0] == now
    steps = list(pairwise([(0.0, first), *sizes]))
    assert all(1 <= size <= 8 for _, size in sizes)
    assert all(new >= old - 1 and new <= max(2, 2 * old) for (_, old), (_, new) in steps)
    moves = [(at, new > old) for (_, old), (at, new) in steps if new != old]
    downs = [at for at, up in moves if not up]
    assert all(later - at >= SHRINK_EVERY_S for at, later in pairwise(downs))
    turns = [at for (_, before), (at, after) in pairwise(moves) if before != after]
    assert all(sum(at <= other < at + WINDOW_S for other in turns) <= 2 for at in turns)
    for (at, up), (later, up_later) in pairwise(moves):
        assert not (up and not up_later) or later - at >= WINDOW_S


@given(loads, st.integers(1, 8), st.integers(0, 8))
def test_who_is_overloaded_is_never_told_to_shrink(load: Load, replicas: int, ready: int):
    size, _ = scaling(load, pool(replicas, min(ready, replicas)), Past(((-2 * WINDOW_S, 1),)), 0.0)
    assert size >= min(replicas, wanted(load, pool(replicas, min(ready, replicas))))


def test_who_has_least_to_lose_leaves_first():
    workers = [
        Worker("a", True, 0.0),
        Worker("b", True, 3.0),
        Worker("c", False, 9.0),
        Worker("d", True, 0.0),
    ]
    assert leaving(workers, 3) == ["c", "a", "d"]
    assert leaving(workers, 0) == []
    assert leaving(workers, 9) == ["c", "a", "d", "b"]
