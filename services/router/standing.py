"""In which state each worker is, kept up to date change by change: looking at ten thousand takes too long."""

from __future__ import annotations

from collections import Counter, OrderedDict
from enum import StrEnum


class WorkerState(StrEnum):
    CONNECTING = "connecting"
    READY = "ready"
    DRAINING = "draining"
    DUPLICATE = "duplicate"
    INCOMPATIBLE = "incompatible"
    SILENT = "silent"
    LOST = "lost"


class Standings:
    """Workers by address. `counts`: by role ("" where none was told yet) and state. `amiss`: those neither
    ready nor duplicates, in the order in which they became so."""

    def __init__(self) -> None:
        self.counts: Counter[tuple[str, WorkerState]] = Counter()
        self.amiss: dict[str, None] = {}
        self._known: dict[str, tuple[str, WorkerState]] = {}
        self._heard: OrderedDict[str, float] = OrderedDict()  # the longest ago first
        self._changed: dict[str, None] = {}

    def put(self, address: str, role: str, state: WorkerState) -> None:
        before = self._known.get(address)
        if before == (role, state):
            return
        if before is not None:
            self.counts[before] -= 1
        self.counts[role, state] += 1
        self._known[address] = role, state
        self._changed[address] = None
        if state in (WorkerState.READY, WorkerState.DUPLICATE):
            self.amiss.pop(address, None)
        else:
            self.amiss[address] = None

    def leave(self, address: str) -> None:
        self.counts[self._known.pop(address)] -= 1
        for names in (self.amiss, self._heard, self._changed):
            names.pop(address, None)

    def heard(self, address: str, now: float) -> None:
        self._heard[address] = now
        self._heard.move_to_end(address)

    def hears(self, address: str) -> bool:
        """Whether `unheard` has not told of it since it was last heard."""
        return address in self._heard

    def unheard(self, since: float) -> list[str]:
        """Those that were not heard since; each is told of once."""
        found = []
        while self._heard and next(iter(self._heard.values())) < since:
            found.append(self._heard.popitem(last=False)[0])
        return found

    def changes(self) -> list[str]:
        """Those in another role or state than when this was last asked."""
        changed, self._changed = self._changed, {}
        return list(changed)
