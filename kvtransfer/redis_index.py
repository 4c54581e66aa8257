"""What one worker believes to be in Redis, for routers to know. No look-up trusts it. Pure; no I/O.

    stored, or found by a look-up or a load     believed until `ttl_s` after that
    missing or damaged when asked for           forgotten
    the server fell silent                      all forgotten

The server evicts without a word and other workers store there, so both directions of error are possible:
what is believed may be gone, until somebody asks for it, and what others stored is not known before the
first look-up. Time counts from when this worker last saw a block; one that another worker used since then
may live longer in Redis than is believed here.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from core.clock import Clock, monotonic
from kvtransfer.tier import OnChange

LIMIT = 65_536
"""Blocks; those seen longest ago are forgotten first. About 200 bytes each."""


class RedisIndex:
    """`on_change` hears of what is believed since now, and no longer. Used on one thread."""

    def __init__(
        self, ttl_s: float, on_change: OnChange, limit: int = LIMIT, clock: Clock = monotonic
    ) -> None:
        self._ttl_s, self._on_change, self._limit, self._clock = ttl_s, on_change, limit, clock
        self._until: OrderedDict[bytes, float] = OrderedDict()  # soonest first

    def __len__(self) -> int:
        return len(self._until)

    def seen(self, hashes: Sequence[bytes], *, renewed: bool) -> None:
        """These are there; `renewed`: with their whole time to live from now on."""
        fresh = [block_hash for block_hash in hashes if block_hash not in self._until]
        until = self._clock() + self._ttl_s
        for block_hash in hashes if renewed else fresh:
            self._until[block_hash] = until
            self._until.move_to_end(block_hash)
        if fresh:
            self._on_change(fresh, ())
        self._expire()

    def missed(self, hashes: Sequence[bytes]) -> None:
        """These are not there."""
        gone = [block_hash for block_hash in hashes if self._until.pop(block_hash, None) is not None]
        if gone:
            self._on_change((), gone)
        self._expire()

    def clear(self) -> None:
        """Nothing can be had."""
        self.missed(list(self._until))

    def _expire(self) -> None:
        now, gone = self._clock(), []
        for block_hash, until in self._until.items():
            if until > now and len(self._until) - len(gone) <= self._limit:
                break
            gone.append(block_hash)
        for block_hash in gone:
            del self._until[block_hash]
        if gone:
            self._on_change((), gone)
