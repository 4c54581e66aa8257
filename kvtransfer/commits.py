"""What comes down out of the pool: slots of the host tier, filled by the pool, found once they are full.

committed      engine's thread    reserve slots -> the pool copies, or begins to
landed         engine's thread    publish -> the store policy decides about the tiers below
               or copy thread     when the copy takes its time (a GPU's)
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress

from core.clock import Clock
from core.log import get
from kvtransfer.host_tier import HostTier
from kvtransfer.stores import Stores
from kvtransfer.threads import DaemonThreads
from kvtransfer.tier_pool import Landing, TierPool

PIECE = 32
"""Blocks that slots are taken for at once: what has to go for them may still be on its way down."""

log = get("kvtransfer")


class Commits:
    """Blocks on their way hold slots, so no more are under way than the host tier has room for."""

    def __init__(
        self, pool: TierPool, host: HostTier, stores: Stores, copier: DaemonThreads, clock: Clock
    ) -> None:
        self._pool, self._host, self._stores = pool, host, stores
        self._copier, self._clock = copier, clock

    def committed(self, hashes: Sequence[bytes], block_ids: Sequence[int]) -> None:
        """Blocks `block_ids` of the pool, of one chain, hold this content; they may change on return."""
        for at in range(0, len(hashes), PIECE):
            self._commit(hashes[at : at + PIECE], block_ids[at : at + PIECE])

    def _commit(self, hashes: Sequence[bytes], block_ids: Sequence[int]) -> None:
        held = [block_hash for block_hash in hashes if self._host.holds(block_hash)]
        missing, slots = self._host.reserve(hashes)
        self._stores.used(held, computed=True)
        if not slots:
            return
        began, fresh = self._clock(), [hashes[i] for i in missing]
        try:
            into = [self._host.slot(slot) for slot in slots]
            landing = self._pool.read([block_ids[i] for i in missing], into)
        except BaseException:
            self._host.give_back(slots)
            raise
        if landing is None:
            self._landed(fresh, slots, began)
            return
        with suppress(RuntimeError):  # no more jobs: the process is leaving, and the slots with it
            self._copier.submit(self._land, landing, fresh, slots, began)

    def _land(self, landing: Landing, hashes: Sequence[bytes], slots: Sequence[int], began: float) -> None:
        try:
            landing()
        except Exception as error:  # the GPU's: the engine meets it in its next step
            self._host.give_back(slots)
            log.error("tier.broke", tier=self._host.name, operation="store", exc_info=error)
            return
        self._landed(hashes, slots, began)

    def _landed(self, hashes: Sequence[bytes], slots: Sequence[int], began: float) -> None:
        self._host.stored(len(slots), self._clock() - began)
        self._host.publish(hashes, slots)
        self._stores.used(hashes, computed=True)
