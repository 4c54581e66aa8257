"""Who is looked at, of a pool of any size."""

from __future__ import annotations

import random

import pytest

from planning.shortlist import ALL_UP_TO, LEAST_BUSY, Pool


def pool(size: int, seed: int = 0) -> Pool:
    workers = Pool(random.Random(seed))
    for number in range(size):
        workers.join(f"w{number}", 4096)
        workers.update(f"w{number}", float(number), 10.0, True, 16, 2)
    return workers


@pytest.mark.parametrize("size", [1, 5, ALL_UP_TO])
def test_all_of_a_small_pool(size):
    assert pool(size).pick(0, 100, []) == [f"w{number}" for number in range(size)]


def test_of_a_large_one_the_less_busy_of_a_sample_and_the_holders():
    workers = pool(1000)
    picks = [workers.pick(0, 100, ["w700", "w701"]) for _ in range(100)]
    for picked in picks:
        assert {"w700", "w701"} <= set(picked)
        assert LEAST_BUSY <= len(picked) == len(set(picked)) <= LEAST_BUSY + 2
    best = sorted(min(int(name[1:]) for name in picked) for picked in picks)
    assert best[89] < 80, "nine times in ten one of the least busy 8%"
    assert len({name for picked in picks for name in picked}) > 100


def test_of_equally_busy_ones_who_was_sent_less():
    workers = pool(100)
    for number in range(100):
        workers.update(f"w{number}", 0.0, 10.0, True, 16, 2)
    workers.sent({f"w{number}": 3 for number in range(100) if number >= 30})
    assert all(int(name[1:]) < 30 for _ in range(20) for name in workers.pick(0, 100, [])[:3])


def test_counts_of_what_was_sent_fade_and_never_overflow():
    workers = pool(2)
    workers.sent({"w0": 16})
    for _ in range(20_000):
        workers.sent({"w1": 1})
    assert workers.recent("w0") < 1e-9
    assert 31 < workers.recent("w1") <= 32
    workers.join("new", 10)
    assert workers.recent("new") == workers.recent("w0")


@pytest.mark.parametrize("size", [5, 300])
def test_nobody_who_cannot(size):
    workers = pool(size)
    workers.update("w0", 0.0, 10.0, False, 16, 2)
    workers.update("w1", 0.0, 5.0, True, 16, 2)
    workers.leave("w2")
    workers.leave("w2")
    picked = workers.pick(6.0, 100, ["w0", "w1", "w3", "w4"], without=["w4", "gone"])
    assert not {"w0", "w1", "w2", "w4"} & set(picked)
    assert "w3" in picked
    assert len(workers) == size - 1
    assert workers.seats(6.0) == (16 * (size - 3), 2 * (size - 3))


def test_the_largest_where_none_is_large_enough():
    workers = pool(3)
    workers.join("large", 5000)
    workers.update("large", 9.0, 10.0, True, 16, 2)
    assert workers.pick(0, 4999, []) == ["large"]
    assert workers.pick(0, 9999, []) == ["large"]
    assert pool(2).pick(11, 1, []) == Pool(random.Random(0)).pick(0, 1, []) == []


def test_the_few_usable_ones_of_many_are_found():
    workers = pool(500)
    for number in range(499):
        workers.update(f"w{number}", 0.0, 10.0, False, 16, 2)
    assert all(workers.pick(0, 1, []) == ["w499"] for _ in range(20))


def test_workers_come_and_go():
    workers = pool(130)
    for number in range(0, 130, 2):
        workers.leave(f"w{number}")
    for number in range(100):
        workers.join(f"n{number}", 10)
    assert sorted(workers) == sorted([f"w{i}" for i in range(1, 130, 2)] + [f"n{i}" for i in range(100)])
    seen = {name for _ in range(200) for name in workers.pick(0, 1, [])}
    assert seen <= {f"w{number}" for number in range(1, 130, 2)}, "none of the new has said that it is ready"
    for name in list(workers):
        workers.leave(name)
    assert workers.pick(0, 1, []) == []
