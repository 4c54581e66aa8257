"""Leases where nobody keeps a clock for them: a worker is there as long as what it writes changes. Pure.

Each observer counts with its own clock from when *it* last saw a change, so no two clocks are compared.
What it sees for the first time counts as just changed: a router that starts believes a dead worker for
one lease, and its `Watch` stream tells it better at once.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from dataclasses import dataclass

FORGET_AFTER_LEASES = 10
"""Whoever has been silent for so many leases is not only late: its entry can go."""


def beat(lease_s: float) -> bytes:
    """What a worker writes: how long it counts, and something that it never wrote before."""
    return f"{lease_s:g} {secrets.token_hex(8)}".encode()


@dataclass(slots=True)
class _Seen:
    value: bytes
    changed_at: float
    lease_s: float


class Beats:
    """One observer's memory."""

    def __init__(self) -> None:
        self._seen: dict[str, _Seen] = {}

    def observe(self, entries: Mapping[str, bytes], now: float) -> tuple[frozenset[str], frozenset[str]]:
        """From address -> what it wrote last: the addresses that are there, and those to be deleted.

        An entry that is no beat is not there, and is deleted at once."""
        seen: dict[str, _Seen] = {}
        for address, value in entries.items():
            known = self._seen.get(address)
            if known is not None and known.value == value:
                seen[address] = known
            elif (lease_s := _lease_s(value)) > 0:
                seen[address] = _Seen(value, now, lease_s)
        self._seen = seen
        live = frozenset(a for a, each in seen.items() if now - each.changed_at < each.lease_s)
        stale = {a for a, s in seen.items() if now - s.changed_at >= FORGET_AFTER_LEASES * s.lease_s}
        return live, frozenset(stale | (entries.keys() - seen.keys()))


def _lease_s(value: bytes) -> float:
    """Seconds; 0 = this is no beat."""
    try:
        return float(value.split(b" ")[0])
    except ValueError:
        return 0.0
