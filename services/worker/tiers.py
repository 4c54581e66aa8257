"""The tiers of one worker, as its engine and its services see them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from blake3 import blake3

from core.blocks import hash_blocks
from core.kv import Fingerprint, KVLayout
from core.settings import Settings
from engine.messages import LoadOrdered
from kvtransfer.block_heads import BlockCopies
from kvtransfer.device_region import DeviceRegion
from kvtransfer.region import Region
from kvtransfer.store_policy import StorePolicy
from kvtransfer.tier import Tier
from kvtransfer.tier_pool import DevicePool, RankPool, RegionPool, TierPool
from kvtransfer.tier_stack import Held, TierStack, parse_order
from services.worker.kv_events import KVEventLog


class WorkerStore:
    """The engine's `BlockStore`: copies what was committed into the tiers, and keeps routers informed."""

    def __init__(self, stack: TierStack | None, events: KVEventLog, parks: bool) -> None:
        self._stack, self._events, self._parks = stack, events, parks

    def committed(self, hashes: Sequence[bytes], block_ids: Sequence[int], num_from_store: int) -> None:
        self._events.report("device", stored=hashes)
        if self._stack:
            self._stack.committed(hashes[num_from_store:], block_ids[num_from_store:])

    def evicted(self, block_hash: bytes) -> None:
        self._events.report("device", evicted=(block_hash,))

    def touched(self, hashes: Sequence[bytes]) -> None:
        if self._stack:
            self._stack.touch(hashes)

    def released(self, hashes: Sequence[bytes]) -> None:
        if self._stack:
            self._stack.host.touch(hashes)

    def park(self, hashes: Sequence[bytes]) -> int:
        return self._stack.host.pin(hashes) if self._stack and self._parks else 0

    def unpark(self, hashes: Sequence[bytes]) -> None:
        if self._stack and hashes:
            self._stack.host.unpin(hashes)


class Lookups:
    """One look-up over all tiers for each request, before the engine takes it up.

    `token_s` gives the seconds in which this worker computes a prompt token.
    """

    def __init__(self, stack: TierStack, fingerprint: Fingerprint, token_s: Callable[[], float]) -> None:
        self.stack = stack
        self._fingerprint, self._token_s = fingerprint, token_s
        self._found: dict[str, list[Held]] = {}

    @property
    def block_budget_s(self) -> float:
        """Seconds in which this worker computes one block; a tier that takes longer is not worth asking."""
        return self._token_s() * self._fingerprint.block_size

    async def look_up(self, request_id: str, token_ids: Sequence[int], num_blocks: int, salt: str) -> int:
        """How many of the first `num_blocks` blocks the tiers hold; kept for `found`, until `forget`."""
        size = self._fingerprint.block_size
        hashes = hash_blocks(self._fingerprint.namespace, token_ids[: num_blocks * size], size, salt)
        held = await self.stack.lookup(hashes, self.block_budget_s)
        self._found[request_id] = held
        return sum(each.count for each in held)

    async def found(self, order: LoadOrdered) -> list[Held]:
        """Who holds the leading blocks of an order: as looked up before, for a parked one as it is now."""
        first_block, hashes = order.first_block, order.hashes
        held = self._found.pop(order.request_id, None)
        if held is None or order.parked:
            return await self.stack.lookup(hashes, self.block_budget_s)
        until = first_block + len(hashes)
        clipped = ((each.source, max(each.first, first_block), each.first + each.count) for each in held)
        return [
            Held(source, first - first_block, min(end, until) - first)
            for source, first, end in clipped
            if first < min(end, until)
        ]

    def forget(self, request_id: str) -> None:
        """Idempotent."""
        self._found.pop(request_id, None)


def tier_namespace(fingerprint: Fingerprint, dtype: str, quantization: str) -> bytes:
    """32 bytes. Two workers may compute differently and still hand over blocks, by choice; what lives on is
    kept apart by how it was computed, or an fp32 worker would one day serve an int8 worker's KV."""
    return blake3(b"\x1f".join((fingerprint.namespace, dtype.encode(), quantization.encode()))).digest()


def tier_pool(layout: KVLayout, regions: Sequence[Region], copies: BlockCopies) -> TierPool:
    """A worker's pool for its tiers. `layout`: the whole model's; `copies`: the kernels of its device."""
    if len(regions) > 1:
        return RankPool(layout, regions, copies)
    region = regions[0]
    return DevicePool(region, copies) if isinstance(region, DeviceRegion) else RegionPool(region)


def make_stack(
    settings: Settings,
    make_pool: Callable[[], TierPool],
    fingerprint: Fingerprint,
    dtype: str,
    events: KVEventLog,
) -> TierStack | None:
    """The tiers that the settings name, each of which reports its blocks; None when they name none.
    Raises ConfigError for a directory that cannot be used."""
    made: dict[str, Tier] = {}
    namespace = tier_namespace(fingerprint, dtype, settings.quantization)
    stall_s = settings.tier_timeout_s
    if not (settings.host_cache_bytes or settings.disk_cache_dir or settings.redis_url):
        return None
    pool = make_pool()
    if settings.disk_cache_dir:
        from kvtransfer.disk_files import BlockFiles
        from kvtransfer.disk_tier import DiskTier

        files = BlockFiles(Path(settings.disk_cache_dir).expanduser(), namespace, pool.block_nbytes)
        made["disk"] = DiskTier(files, settings.disk_cache_bytes, stall_s, partial(events.report, "disk"))
    if settings.redis_url:
        from kvtransfer.redis_tier import RedisTier

        made["redis"] = RedisTier(
            settings.redis_url,
            namespace,
            pool.block_nbytes,
            settings.redis_ttl_s,
            stall_s,
            partial(events.report, "redis"),
        )
    return TierStack(
        pool,
        settings.host_cache_bytes,
        [made[name] for name in parse_order(settings.tier_order) if name in made],
        StorePolicy(settings.store_policy),
        lookup_timeout_s=2 * stall_s,
        load_timeout_s=4 * stall_s,
        on_host_change=partial(events.report, "host"),
    )
