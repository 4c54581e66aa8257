"""Who waits, in order of arrival."""

from __future__ import annotations

import random
from typing import Any

import pytest

from engine.wait_queue import WaitQueue, insert


class Waiting:
    """As much of a sequence as the queue looks at."""

    def __init__(self, order: int) -> None:
        self.order = order
        self.seq_id = str(order)


def test_it_keeps_the_order_of_arrival_and_counts_tokens() -> None:
    queue, rng = WaitQueue(), random.Random(1)
    everybody: list[Any] = [Waiting(order) for order in range(-20, 200)]
    for seq in rng.sample(everybody, len(everybody)):
        queue.add(seq, seq.order + 100)
    gone = rng.sample(everybody, 150)
    for seq in gone:
        queue.remove(seq)
    left = [seq for seq in everybody if seq not in gone]
    assert list(queue) == left
    assert queue.num_tokens == sum(seq.order + 100 for seq in left)


def test_who_does_not_wait_cannot_be_removed() -> None:
    queue = WaitQueue()
    known: Any = Waiting(3)
    queue.add(known, 10)
    for other in (Waiting(2), Waiting(3), Waiting(4)):
        with pytest.raises(ValueError, match="does not wait"):
            queue.remove(other)  # type: ignore[arg-type]
    assert (len(queue), queue.num_tokens) == (1, 10)


def test_a_place_is_found_without_looking_at_all() -> None:
    looked = 0

    class Counting(Waiting):
        def __getattribute__(self, name: str) -> Any:
            nonlocal looked
            looked += name == "order"
            return super().__getattribute__(name)

    line: list[Any] = []
    for order in range(1000):
        insert(line, Counting(order))  # type: ignore[arg-type]
    looked = 0
    insert(line, Counting(500))  # type: ignore[arg-type]
    assert looked <= 12
