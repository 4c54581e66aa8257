"""Who goes next: tables for priorities and turns, properties for shares, order and bounds."""

from __future__ import annotations

import random
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from planning.fair_queue import QUANTUM_TOKENS, FairQueue, Share, Ticket

KEYS = {name: Share(name, weight) for name, weight in (("a", 1.0), ("b", 1.0), ("c", 2.0), ("d", 0.5))}


def tickets(*kinds: tuple[str, int, int]) -> list[Ticket]:
    """From (key, priority, cost)."""
    return [Ticket(i, KEYS[key], priority, cost) for i, (key, priority, cost) in enumerate(kinds)]


def filled(waiting: list[Ticket]) -> FairQueue:
    queue = FairQueue()
    for ticket in waiting:
        queue.push(ticket)
    return queue


def drained(queue: FairQueue) -> list[int]:
    return [queue.pop().number for _ in range(len(queue))]


@pytest.mark.parametrize(
    ("waiting", "order"),
    [
        ([("a", 0, 5), ("a", 0, 5), ("a", 0, 5)], [0, 1, 2]),
        ([("a", 5, 5), ("a", 0, 5), ("b", -3, 5)], [2, 1, 0]),
        ([("a", 0, 1024), ("a", 0, 1024), ("b", 0, 1024), ("b", 0, 1024)], [0, 2, 1, 3]),
        ([("a", 0, 512)] * 4 + [("b", 0, 1024)] * 2, [0, 1, 4, 2, 3, 5]),
        ([("a", 0, 1024)] * 3 + [("c", 0, 1024)] * 3, [0, 3, 4, 1, 5, 2]),
        ([("a", 0, 5000)] + [("b", 0, 1024)] * 6, [1, 2, 3, 4, 0, 5, 6]),
        ([("b", 0, 10**9)], [0]),
        ([("b", 0, 10**9), ("d", 0, 10**9)], [0, 1]),
    ],
)
def test_the_order(waiting, order):
    assert drained(filled(tickets(*waiting))) == order


def test_one_that_left_neither_goes_nor_takes_a_turn():
    waiting = tickets(("a", 0, 1000), ("a", 0, 1000), ("b", 0, 1000), ("b", 3, 1000))
    queue = filled(waiting)
    assert [queue.remove(waiting[i]) for i in (0, 0, 3)] == [True, False, True]
    assert drained(queue) == [1, 2]
    assert len(queue) == queue.tokens == 0


@pytest.mark.parametrize(
    ("waiting", "turned_away"),
    [
        ([("a", 0, 5), ("a", 0, 5), ("b", 0, 5)], 1),  # the longest line, its newest
        ([("a", 0, 5), ("a", 0, 5)], 1),
        ([("a", 0, 5), ("b", 0, 5)], 1),  # of equal lines the newcomer's
        ([("a", 0, 5), ("c", 0, 5), ("c", 0, 5)], 2),  # c has twice the weight
        ([("a", 0, 5), ("d", 0, 5), ("b", 0, 5)], 1),  # d has half of it
        ([("a", 7, 5), ("b", 0, 5), ("b", 0, 5)], 0),  # the last priority first
        ([("b", 0, 5), ("b", 0, 5), ("a", 7, 5)], 2),
    ],
)
def test_who_is_turned_away(waiting, turned_away):
    made = tickets(*waiting)
    assert filled(made).least_entitled(made[-1]).number == turned_away


@pytest.mark.parametrize(
    ("waiting", "before"),
    [
        ([("a", 0, 100)], 0),
        ([("a", 0, 100), ("a", 0, 50)], 100),
        ([("b", -1, 70), ("a", 0, 100), ("a", 0, 50), ("b", 1, 900)], 170),
        ([("b", 0, 500), ("a", 0, 100)], 100),  # as much as this key's
        ([("c", 0, 500), ("a", 0, 100)], 200),  # twice as much
        ([("c", 0, 150), ("a", 0, 100)], 150),
    ],
)
def test_what_goes_before(waiting, before):
    made = tickets(*waiting)
    last = [t for t in made if t.priority == 0][-1]
    assert filled(made).tokens_before(last) == before


costs = st.integers(1, 4000)
lines = st.dictionaries(st.sampled_from("abcd"), st.lists(costs, min_size=1, max_size=40), min_size=2)


@given(lines)
@settings(max_examples=150, deadline=None)
def test_shares_are_equal_within_a_quantum_and_a_request(waiting):
    """While two keys both wait, what each got by weight differs by no more than a quantum and the dearest
    request; each key's requests go in the order in which they came."""
    queue, left, number = FairQueue(), Counter(), 0
    for key, line in waiting.items():
        for cost in line:
            queue.push(Ticket(number, KEYS[key], 0, cost))
            left[key] += 1
            number += 1
    got = dict.fromkeys(waiting, 0.0)
    last = dict.fromkeys(waiting, -1)
    bound = QUANTUM_TOKENS + max(max(line) / KEYS[key].weight for key, line in waiting.items())
    while all(left.values()):
        ticket = queue.pop()
        key = ticket.share.name
        assert ticket.number > last[key]
        last[key] = ticket.number
        left[key] -= 1
        got[key] += ticket.cost_tokens / ticket.share.weight
        assert max(got.values()) - min(got.values()) <= bound


@given(st.integers(0, 2**32), costs)
@settings(max_examples=60, deadline=None)
def test_nobody_starves(seed, cost):
    """However fast one key sends, another's request goes before its own cost and two quanta more of it."""
    rng = random.Random(seed)
    queue = FairQueue()
    number = 1
    for _ in range(rng.randrange(20)):
        queue.push(Ticket(number := number + 1, KEYS["a"], 0, rng.randint(1, 4000)))
    theirs = Ticket(0, KEYS["b"], 0, cost)
    queue.push(theirs)
    before, dearest = 0, 0
    while True:
        for _ in range(rng.randrange(1, 4)):
            queue.push(Ticket(number := number + 1, KEYS["a"], 0, rng.randint(1, 4000)))
        ticket = queue.pop()
        if ticket is theirs:
            break
        before += ticket.cost_tokens
        dearest = max(dearest, ticket.cost_tokens)
        assert before <= cost + 2 * QUANTUM_TOKENS + dearest


moves = st.tuples(
    st.sampled_from("abcd"), st.integers(-2, 2), costs, st.sampled_from(["stay", "pop", "leave"])
)


@given(st.lists(moves, max_size=60), st.randoms(use_true_random=False))
@settings(max_examples=150, deadline=None)
def test_everybody_goes_once_or_leaves(moves, rng):
    """Pushes, pops and leavings in any order lose nobody, and the sums stay true."""
    queue, inside = FairQueue(), {}
    for number, (key, priority, cost, then) in enumerate(moves):
        ticket = inside[number] = Ticket(number, KEYS[key], priority, cost)
        queue.push(ticket)
        if then == "pop":
            out = queue.pop()
            assert out.priority == min(each.priority for each in inside.values())
            del inside[out.number]
        elif then == "leave":
            out = inside.pop(rng.choice(list(inside)))
            assert queue.remove(out)
        assert len(queue) == len(inside)
        assert queue.tokens == sum(each.cost_tokens for each in inside.values())
    assert sorted(drained(queue)) == sorted(inside)
