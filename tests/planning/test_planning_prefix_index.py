"""What a router knows of its workers' blocks: whatever comes in whatever order, no more than they hold."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from planning.prefix_index import Changes, PrefixIndex

RNG = random.Random(0)


def index_of(**held: dict[str, list[int]]) -> PrefixIndex:
    index = PrefixIndex()
    for worker, tiers in held.items():
        changes = [Changes(tier, stored) for tier, stored in tiers.items()]
        assert index.apply(worker, 0, 1, True, changes)
    return index


def holders(index: PrefixIndex, keys: list[int], at_most: int = 8) -> list[str]:
    return list(index.holders(keys, at_most, RNG))


def test_leading_blocks_each_from_the_cheapest_tier():
    index = index_of(a={"device": [1, 2], "host": [2, 3, 4], "disk": [1, 2, 3, 4, 5, 7]}, b={"tape": [1]})
    assert index.leading("a", [1, 2, 3, 4, 5, 6, 7]) == {"device": 2, "host": 2, "disk": 1}
    assert index.leading("a", [1, 2]) == {"device": 2}
    assert index.leading("a", [6, 1]) == index.leading("b", [1]) == index.leading("c", [1]) == {}
    assert index.leading("a", []) == {}
    assert (index.num_blocks("a"), index.num_blocks("b"), index.num_blocks("c")) == (6, 0, 0)


def test_a_block_stays_known_as_long_as_a_tier_holds_it():
    index = index_of(a={"device": [1], "host": [1]})
    assert index.apply("a", 1, 2, False, [Changes("device", evicted=[1])])
    assert index.leading("a", [1]) == {"host": 1}
    assert index.apply("a", 2, 3, False, [Changes("host", evicted=[1, 99])])
    assert index.leading("a", [1]) == {}
    assert holders(index, [1]) == []


def test_numbers_a_gap_needs_a_snapshot_and_repetitions_change_nothing():
    index = PrefixIndex()
    assert not index.apply("a", 0, 1, False, [Changes("device", [1])]), "nothing before was seen"
    assert index.apply("a", 0, 5, True, [Changes("device", [1, 2])])
    assert index.apply("a", 3, 5, False, [Changes("device", evicted=[1])]), "seen before"
    assert index.leading("a", [1, 2]) == {"device": 2}
    assert index.apply("a", 5, 6, False, [Changes("device", [3])])
    assert index.apply("a", 0, 5, True, []), "a snapshot that is older than what is known"
    assert index.leading("a", [1, 2, 3]) == {"device": 3}
    assert not index.apply("a", 8, 9, False, [Changes("device", [4])]), "6 and 7 are missing"
    assert index.num_blocks("a") == 0
    assert not index.apply("a", 9, 10, False, []), "until a snapshot"
    assert index.apply("a", 9, 10, True, [Changes("host", [7])])
    assert index.leading("a", [7]) == {"host": 1}


def test_a_snapshot_replaces_one_workers_blocks_only():
    index = index_of(a={"device": [1, 2]}, b={"device": [1, 2, 3]}, c={"device": [1]})
    assert index.apply("b", 1, 2, True, [Changes("device", [1, 9])])
    assert index.leading("b", [1, 2, 3]) == {"device": 1}
    assert index.leading("a", [1, 2]) == {"device": 2}
    assert sorted(holders(index, [1, 2])) == ["a", "b", "c"]
    assert holders(index, [1, 2])[0] == "a"
    index.forget("a")
    index.forget("a")
    assert sorted(holders(index, [1, 2])) == ["b", "c"]


def test_holders_come_with_the_longest_prefix_first():
    index = index_of(
        short={"device": [1]}, long={"disk": [1, 2, 3]}, mid={"host": [1, 2]}, other={"device": [5]}
    )
    assert holders(index, [1, 2, 3, 4, 5]) == ["long", "mid", "short"]
    assert holders(index, [4, 1]) == holders(index, []) == []


def test_of_many_holders_a_few_and_not_always_the_same():
    index = index_of(**{f"w{number}": {"device": [1]} for number in range(1000)})
    seen = [holders(index, [1], at_most=4) for _ in range(50)]
    assert all(len(set(each)) == 4 for each in seen)
    assert len({name for each in seen for name in each}) > 50


events = st.tuples(
    st.sampled_from(["a", "b", "c"]),
    st.sampled_from(["device", "host", "disk"]),
    st.lists(st.integers(0, 12), max_size=6),
    st.lists(st.integers(0, 12), max_size=6),
)


@given(st.lists(events, max_size=30), st.randoms(use_true_random=False))
def test_the_index_is_what_the_workers_hold(sent, rng):
    """Each message arrives once or twice, older ones again at times; a worker's own are in order."""
    held: dict[str, dict[str, set[int]]] = {w: {t: set() for t in ("device", "host", "disk")} for w in "abc"}
    index = PrefixIndex()
    numbers = dict.fromkeys("abc", 1)
    past = []
    for worker in "abc":
        assert index.apply(worker, 0, 1, True, ())
    for worker, tier, stored, evicted in sent:
        held[worker][tier].difference_update(evicted)
        held[worker][tier].update(stored)
        first = numbers[worker]
        numbers[worker] += 1
        past.append((worker, first, first + 1, False, [Changes(tier, stored, evicted)]))
        for message in [past[-1], *rng.sample(past, rng.randrange(len(past)))]:
            assert index.apply(*message)
    for worker, tiers in held.items():
        everything = set().union(*tiers.values())
        assert index.num_blocks(worker) == len(everything)
        for key in range(13):
            cheapest = next((tier for tier in ("device", "host", "disk") if key in tiers[tier]), None)
            assert index.leading(worker, [key]) == ({cheapest: 1} if cheapest else {})
            assert (worker in holders(index, [key])) == (key in everything)


@pytest.mark.parametrize("at_most", [1, 8])
def test_a_holder_is_named_once(at_most):
    index = index_of(a={"device": [1, 2, 3]}, b={"device": [1, 2]})
    found = holders(index, [1, 2, 3], at_most)
    assert len(found) == len(set(found))
    assert found[0] == "a"
