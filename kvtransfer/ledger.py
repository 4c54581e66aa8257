"""The one ledger of operations in flight on local blocks: who may free a block, and when.

    owner's blocks     no operation     operation in flight
    kept by owner      -                pending
    released           returned         quarantined -> on_quiet(block_ids) when the last one ends

A block is never returned, and never announced quiet, while an operation on it is in flight. Not
thread-safe: all calls come from one thread (the event loop), as does the callback.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

OnQuiet = Callable[[list[int]], None]


@dataclass(frozen=True, slots=True, eq=False)
class Operation:
    """One transfer in flight on `block_ids` of `owner`. Compared by identity."""

    owner: str
    block_ids: tuple[int, ...]


class Ledger:
    """`on_quiet(block_ids)`: blocks that were released while in use and may be freed now."""

    def __init__(self, on_quiet: OnQuiet) -> None:
        self._on_quiet = on_quiet
        self._operations: set[Operation] = set()
        self._in_flight: Counter[int] = Counter()  # block -> operations on it
        self._owner: dict[int, str] = {}  # of each block in flight
        self._quarantined: set[int] = set()

    def begin(self, owner: str, block_ids: Sequence[int]) -> Operation:
        """Record an operation before it starts.

        Raises ValueError when a block is quarantined or in flight for another owner: it was given
        out while it could still be written.
        """
        for block in block_ids:
            if block in self._quarantined or self._owner.get(block, owner) != owner:
                raise ValueError(f"block {block} is still in flight for {self._owner[block]}, not {owner}")
        operation = Operation(owner, tuple(block_ids))
        self._operations.add(operation)
        self._in_flight.update(operation.block_ids)
        self._owner.update(dict.fromkeys(block_ids, owner))
        return operation

    def end(self, operation: Operation) -> None:
        """The operation's blocks are quiet as far as it goes. Idempotent."""
        if operation not in self._operations:
            return
        self._operations.remove(operation)
        self._in_flight.subtract(operation.block_ids)
        quiet = [block for block in dict.fromkeys(operation.block_ids) if not self._in_flight[block]]
        for block in quiet:
            del self._in_flight[block], self._owner[block]
        freed = [block for block in quiet if block in self._quarantined]
        self._quarantined.difference_update(freed)
        if freed:
            self._on_quiet(freed)

    def release(self, owner: str, block_ids: Iterable[int]) -> list[int]:
        """The owner gives these blocks up: returns those that may be freed now.

        The others are quarantined and come back through `on_quiet`; releasing them again changes
        nothing. Raises ValueError for a block in flight for another owner.
        """
        quiet = []
        for block in block_ids:
            if block not in self._in_flight:
                quiet.append(block)
            elif self._owner[block] != owner:
                raise ValueError(f"block {block} belongs to {self._owner[block]}, not {owner}")
            else:
                self._quarantined.add(block)
        return quiet

    @property
    def in_flight(self) -> int:
        """Operations that have not ended."""
        return len(self._operations)

    @property
    def quarantined(self) -> int:
        """Blocks that were released and are not quiet yet."""
        return len(self._quarantined)
