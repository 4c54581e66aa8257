"""The few workers of a large pool that are worth pricing: the less busy ones of a random sample, and those
that hold a part of the prompt.

A sample of 32 has one of the least busy 8% nine times in ten, whatever the pool's size, and routers that know
the same do not all run to the same worker.
"""

from __future__ import annotations

import random
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from heapq import nsmallest

from planning.balance import fade

ALL_UP_TO = 64
"""A pool that is no larger is looked at whole."""

SAMPLE = 32
LEAST_BUSY = 6
"""Of the sample, those that are priced."""

RECENT_S = 0.01
"""Between workers that have equally little to do: what a sequence sent lately counts as."""


@dataclass(slots=True)
class _Row:
    """`recent` is in units that grow as the counts of all fade."""

    name: str
    place: int
    max_tokens: int
    recent: float
    busy_s: float = 0.0
    heard_at: float = 0.0
    usable: bool = False
    seats: int = 0
    load: int = 0


class Pool:
    """The workers of one role."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self._rows: dict[str, _Row] = {}
        self._places: list[_Row] = []
        self._unit = 1.0
        """What a sequence sent now counts as, in `_Row.recent`."""

    def __len__(self) -> int:
        return len(self._rows)

    def __iter__(self) -> Iterator[str]:
        return iter(self._rows)

    def __contains__(self, name: str) -> bool:
        return name in self._rows

    def join(self, name: str, max_tokens: int) -> None:
        """A worker is there, not usable yet. `max_tokens`: the longest request it can hold.

        It is taken for one that was sent as little lately as any other, else it would get all until it has
        caught up.
        """
        least = min((row.recent for row in self._places), default=0.0)
        row = self._rows[name] = _Row(name, len(self._places), max_tokens, least)
        self._places.append(row)

    def leave(self, name: str) -> None:
        """Idempotent."""
        row = self._rows.pop(name, None)
        if row is not None:
            last = self._places.pop()
            if last is not row:
                self._places[row.place], last.place = last, row.place

    def update(self, name: str, busy_s: float, heard_at: float, usable: bool, seats: int, load: int) -> None:
        """`busy_s`: seconds that it adds to whatever comes. `usable`: but for how long it is silent. `seats`,
        `load`: sequences that it runs at once, and has or is about to have."""
        row = self._rows[name]
        row.busy_s, row.heard_at, row.usable = busy_s, heard_at, usable
        row.seats, row.load = seats, load

    def sent(self, counts: dict[str, int]) -> None:
        """So many sequences were sent to each of these; the others' counts fade."""
        self._unit /= fade(len(self._rows)) ** sum(counts.values())
        for name, count in counts.items():
            self._rows[name].recent += count * self._unit
        if self._unit > 1e100:
            for row in self._places:
                row.recent /= self._unit
            self._unit = 1.0

    def recent(self, name: str) -> float:
        """Sequences it was sent lately, see `planning.balance`."""
        return self._rows[name].recent / self._unit

    def seats(self, not_before: float) -> tuple[int, int]:
        """Of all usable workers that were heard since: seats, and sequences there. Looks at each of them."""
        there = [row for row in self._places if row.usable and row.heard_at >= not_before]
        return sum(row.seats for row in there), sum(row.load for row in there)

    def pick(
        self, not_before: float, need_tokens: int, holders: Sequence[str], without: Collection[str] = ()
    ) -> list[str]:
        """Usable workers heard since `not_before` that can hold `need_tokens`, none of `without`.

        All of a small pool; of a large one the less busy of a sample, and those of `holders`. Where none can
        hold so many tokens, the one that can hold the most; empty where none is usable.
        """

        def can(row: _Row) -> bool:
            return row.usable and row.heard_at >= not_before and row.name not in without

        if len(self._places) > ALL_UP_TO:
            rows = {row.name: row for row in self._rng.sample(self._places, SAMPLE)}
            able = [row for row in rows.values() if can(row) and row.max_tokens >= need_tokens]
            held = [self._rows[name] for name in holders]
            able = nsmallest(LEAST_BUSY, able, key=self._busy_s) + [
                row for row in held if can(row) and row.max_tokens >= need_tokens
            ]
            if able:
                return list(dict.fromkeys(row.name for row in able))
        usable = [row for row in self._places if can(row)]
        able = [row for row in usable if row.max_tokens >= need_tokens]
        if not able and usable:
            able = [max(usable, key=lambda row: row.max_tokens)]
        return [row.name for row in nsmallest(ALL_UP_TO, able, key=self._busy_s)]

    def _busy_s(self, row: _Row) -> float:
        return row.busy_s + RECENT_S * row.recent / self._unit
