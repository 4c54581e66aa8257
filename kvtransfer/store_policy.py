"""Which blocks go below the host tier, and when: a value, so that a benchmark can compare them.

write-through   when it is committed for the first time    restarts and peers find everything
second-hit      when it is used for the second time        what nobody asks for again costs no write
on-evict        when the host tier needs its room          below holds what host RAM does not
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from enum import StrEnum


class StorePolicy(StrEnum):
    WRITE_THROUGH = "write-through"
    SECOND_HIT = "second-hit"
    ON_EVICT = "on-evict"


_USES_BEFORE_STORE = {StorePolicy.WRITE_THROUGH: 1, StorePolicy.SECOND_HIT: 2}


class Admission:
    """Counts uses of blocks and says which one makes a block worth storing.

    A use is a commit or a hit. Only the last `limit` blocks used are remembered (about 170 bytes each); a
    block that was forgotten starts again. Not thread-safe.
    """

    def __init__(self, policy: StorePolicy, limit: int = 65_536) -> None:
        self.policy = policy
        self._threshold = _USES_BEFORE_STORE.get(policy)
        self._limit = limit
        self._uses: OrderedDict[bytes, int] = OrderedDict()

    def used(self, hashes: Sequence[bytes], computed: bool = False) -> list[bytes]:
        """One use more of each; those to store now, in order: each one once, and again when it was
        `computed` since no tier had it, so that what a tier lost or found damaged gets there anew."""
        if self._threshold is None:
            return []
        due = []
        for block_hash in hashes:
            uses = self._uses.pop(block_hash, 0) + 1
            self._uses[block_hash] = min(uses, self._threshold + 1)
            if uses == self._threshold or (computed and uses > self._threshold):
                due.append(block_hash)
        while len(self._uses) > self._limit:
            self._uses.popitem(last=False)
        return due

    def not_stored(self, block_hash: bytes) -> None:
        """It could not be stored after all: its next use asks for it again."""
        if block_hash in self._uses and self._threshold is not None:
            self._uses[block_hash] = self._threshold - 1

    def __len__(self) -> int:
        """Blocks remembered."""
        return len(self._uses)
