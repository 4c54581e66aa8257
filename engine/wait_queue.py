"""Sequences that wait for their place, in order of arrival."""

from __future__ import annotations

from collections.abc import Iterator

from engine.sequence import Sequence


def insert(queue: list[Sequence], seq: Sequence) -> None:
    """Keep a queue in order of arrival."""
    at = next((i for i, other in enumerate(queue) if other.order > seq.order), len(queue))
    queue.insert(at, seq)


class WaitQueue:
    """`num_tokens`: that its sequences will compute, as far as is known. Counted as they come and go: no step
    looks at a thousand of them."""

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
        self._queue.remove(seq)
        self.num_tokens -= self._tokens.pop(seq)
