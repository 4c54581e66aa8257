"""Sequences that wait for their place, in order of arrival."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator
from operator import attrgetter

from engine.sequence import Sequence

_order = attrgetter("order")


def insert(queue: list[Sequence], seq: Sequence) -> None:
    """Keep a queue in order of arrival."""
    insort(queue, seq, key=_order)


class WaitQueue:
    """`num_tokens`: that its sequences will compute, as far as is known; counted as they come and go. No two
    have the same order; a place is found by bisection."""

    def __init__(self) -> None:
        self._queue: list[Sequence] = []
        self._tokens: dict[Sequence, int] = {}
        self.num_tokens = 0

    def __len__(self) -> int:
        return len(self._queue)

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self._queue)

    def add(self, seq: Sequence, num_tokens: int) -> None:
        """`num_tokens`: that it will compute."""
        insert(self._queue, seq)
        self._tokens[seq] = num_tokens
        self.num_tokens += num_tokens

    def remove(self, seq: Sequence) -> None:
        """Raises ValueError when it does not wait."""
        at = bisect_left(self._queue, seq.order, key=_order)
        if self._queue[at : at + 1] != [seq]:
            raise ValueError(f"sequence {seq.seq_id} does not wait")
        del self._queue[at]
        self.num_tokens -= self._tokens.pop(seq)
