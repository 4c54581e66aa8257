"""The Redis tier: one value per block, header and payload together, under a key that an operator can read.

    baton:kv:<namespace, 16 hex>:<block hash, 64 hex>     expires `ttl_s` after its last use

A value is there with its header or not at all, whatever the server evicts. What this side remembers of
it is for routers only (`RedisIndex`): no look-up believes it, so it cannot go stale. The blocks of a chain
are spread over a cluster by their keys (no hash tag), so a hot prefix is served by all nodes.

Every operation is cut off when the server falls silent for `stall_s`. The first one that is opens the
breaker; from then on all is a miss that costs nothing, until a probe in the background gets an answer.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Sequence
from typing import Any, TypeVar

from redis.exceptions import ResponseError

from core import log
from core.clock import monotonic
from kvtransfer.breaker import Breaker, Verdict
from kvtransfer.busy import BusyTime
from kvtransfer.deadlines import whole_s
from kvtransfer.payload import HEADER_NBYTES, encode_header
from kvtransfer.redis_client import FAULTS, Command, RedisClient
from kvtransfer.redis_index import RedisIndex
from kvtransfer.redis_values import HARMLESS, RedisValues, Wanted
from kvtransfer.tier import OnChange, TierStats, unheard

BATCH_NBYTES = 2 * 2**20
"""Of one pipeline of a store."""

LOADS_AT_ONCE = 2
LOOKUPS_AT_ONCE = 8
"""One store, the probe and what is discarded take 4 more of the client's MAX_CONNECTIONS. Others wait for
their turn, and deadlines begin with it: so a burst of requests is no silence of the server."""

_log = log.get("kvtransfer")
T = TypeVar("T")


class RedisTier:
    """Values of `block_nbytes` payload for one namespace; `url` as RedisClient reads it. The server evicts
    by itself, so pins do nothing here, and what it holds is not known: `used_nbytes` and `num_blocks` stay
    0. Needs Redis 6.2 or later. Raises ConfigError for a URL that cannot be read."""

    name = "redis"

    def __init__(
        self,
        url: str,
        namespace: bytes,
        block_nbytes: int,
        ttl_s: float,
        stall_s: float,
        on_change: OnChange = unheard,
    ) -> None:
        self._client = RedisClient(url)
        self._namespace = namespace
        self._block_nbytes = block_nbytes
        self._batch = max(1, BATCH_NBYTES // block_nbytes)
        self._expiry = ("PX", str(round(ttl_s * 1000)))
        self._stall_s = stall_s
        self._values = RedisValues(self._client, namespace, self._expiry, stall_s)
        self._index = RedisIndex(ttl_s, on_change)
        self._breaker = Breaker()
        self._room = Breaker()
        """Opens when the server refuses values though it answers: out of memory, read-only."""
        self._one_store = asyncio.Lock()
        self._load_turn = asyncio.Semaphore(LOADS_AT_ONCE)
        self._lookup_turn = asyncio.Semaphore(LOOKUPS_AT_ONCE)
        self._asking: set[asyncio.Task[Any]] = set()
        """Look-ups and the probe under way."""
        self._closed = False
        self._queries = self._hits = self._load_nbytes = self._store_nbytes = 0
        self._corrupt = self._dropped = self._errors = 0
        self._store_s = 0.0
        self._loading = BusyTime()

    async def opened(self) -> bool:
        """True: it connects with the first operation."""
        return True

    async def lookup(self, hashes: Sequence[bytes]) -> int:
        self._queries += len(hashes)
        # goes on to its own deadline when the caller gives up earlier: the breaker must hear of silence
        held = await asyncio.shield(self._begin(self._held(hashes)))
        leading = held.index(False) if False in held else len(held)
        self._hits += leading
        return leading

    async def load(self, hashes: Sequence[bytes], into: Sequence[memoryview]) -> int:
        async with self._load_turn:
            return await self._load(hashes, into)

    async def _load(self, hashes: Sequence[bytes], into: Sequence[memoryview]) -> int:
        if not self._admitted():
            return 0
        wanted = [Wanted(self._key(h), h, view) for h, view in zip(hashes, into, strict=True)]
        with self._loading.running():
            try:
                await self._values.read(wanted, whole_s(self._stall_s, len(hashes) * self._block_nbytes))
            except FAULTS as error:
                self._fail(error)
        outcomes = [each.outcome for each in wanted]
        self._errors += outcomes.count("refused")
        self._index.seen([each.block_hash for each in wanted if each.outcome is None], renewed=True)
        self._index.missed([each.block_hash for each in wanted if each.outcome == "missing"])
        await self._discard([each.block_hash for each in wanted if each.outcome not in HARMLESS])
        leading = next((i for i, outcome in enumerate(outcomes) if outcome is not None), len(outcomes))
        self._load_nbytes += leading * self._block_nbytes
        return leading

    async def store(self, blocks: Sequence[tuple[bytes, memoryview]]) -> int:
        async with self._one_store:
            started = monotonic()
            held = await self._held([block_hash for block_hash, _ in blocks])
            new = [block for block, is_held in zip(blocks, held, strict=True) if not is_held]
            stored = 0
            for first in range(0, len(new), self._batch):
                batch = new[first : first + self._batch]
                stored += await self._write(batch)
            self._dropped += len(new) - stored
            self._store_nbytes += stored * self._block_nbytes
            self._store_s += monotonic() - started
            return len(blocks) - len(new) + stored

    def pin(self, hashes: Sequence[bytes]) -> None: ...

    def unpin(self, hashes: Sequence[bytes]) -> None: ...

    def stats(self) -> TierStats:
        return TierStats(
            queries=self._queries,
            hits=self._hits,
            load_nbytes=self._load_nbytes,
            load_s=self._loading.seconds,
            store_nbytes=self._store_nbytes,
            store_s=self._store_s,
            corrupt=self._corrupt,
            dropped=self._dropped,
            errors=self._errors,
            breaker=self._breaker.state,
        )

    async def close(self) -> None:
        self._closed = True
        for task in self._asking:
            task.cancel()
        if self._asking:
            await asyncio.wait(self._asking)
        self._values.close()
        await self._client.close(self._stall_s)

    def _begin(self, coroutine: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        task = asyncio.create_task(coroutine)
        self._asking.add(task)
        task.add_done_callback(self._asking.discard)
        return task

    def _key(self, block_hash: bytes) -> str:
        return f"baton:kv:{self._namespace[:8].hex()}:{block_hash.hex()}"

    async def _held(self, hashes: Sequence[bytes]) -> list[bool]:
        """Which of these the server holds in full length. What has another length or type is deleted:
        it would stand in the way until it expires."""
        async with self._lookup_turn:
            return await self._lengths_fit(hashes)

    async def _lengths_fit(self, hashes: Sequence[bytes]) -> list[bool]:
        if not hashes or not self._admitted():
            return [False] * len(hashes)
        lengths = await self._run([("STRLEN", self._key(h)) for h in hashes], self._stall_s)
        whole = HEADER_NBYTES + self._block_nbytes
        pairs = list(zip(hashes, lengths or [0] * len(hashes), strict=True))
        if lengths:
            self._index.seen([h for h, length in pairs if length == whole], renewed=False)
            self._index.missed([h for h, length in pairs if length == 0])
        await self._discard([h for h, length in pairs if length not in (0, whole) and not _refused(length)])
        return [length == whole for _, length in pairs]

    async def _discard(self, damaged: Sequence[bytes]) -> None:
        if damaged:
            self._corrupt += len(damaged)
            self._index.missed(damaged)
            _log.warning("redis_tier.corrupt", keys=[self._key(h) for h in damaged[:4]], count=len(damaged))
            await self._run([("UNLINK", self._key(h)) for h in damaged], self._stall_s)

    async def _write(self, batch: Sequence[tuple[bytes, memoryview]]) -> int:
        """Write these values; returns how many the server took."""
        if self._room.admit() is Verdict.REFUSE:
            return 0
        try:
            if not self._admitted():
                self._room.cancelled()
                return 0
            replies = await self._run([self._set(*block) for block in batch], self._stall_s)
        except BaseException:
            self._room.cancelled()
            raise
        refusal = next((reply for reply in replies if isinstance(reply, ResponseError)), None)
        if not replies:
            self._room.cancelled()
        elif refusal is None:
            if self._room.succeeded():
                _log.info("redis_tier.stores_resumed", address=self._client.address)
        elif self._room.failed():
            _log.warning(
                "redis_tier.stores_stopped",
                address=self._client.address,
                reason=str(refusal),
                hint="new blocks are not stored there for now; a cache wants maxmemory-policy allkeys-lru",
            )
        written = [
            h for (h, _), reply in zip(batch, replies, strict=False) if not isinstance(reply, ResponseError)
        ]
        self._index.seen(written, renewed=True)
        return len(written)

    def _set(self, block_hash: bytes, payload: memoryview) -> Command:
        value = b"".join((encode_header(self._namespace, block_hash, payload), payload))
        return "SET", self._key(block_hash), value, *self._expiry

    def _admitted(self) -> bool:
        """Whether the server may be asked now; begins the probe when its time has come."""
        if self._closed:
            return False
        verdict = self._breaker.admit()
        if verdict is Verdict.PROBE:
            self._begin(self._probe())
        return verdict is Verdict.GO

    async def _probe(self) -> None:
        """In the background, so that no request waits for a server that may still be silent."""
        try:
            await self._client.run([("STRLEN", self._key(bytes(32)))], self._stall_s)
        except FAULTS as error:
            self._fail(error)
        except BaseException:
            self._breaker.cancelled()
            raise
        else:
            self._breaker.succeeded()
            _log.info("redis_tier.connected_again", address=self._client.address)

    async def _run(self, commands: Sequence[Command], limit_s: float) -> list[Any]:
        """The replies; none after a fault, which opens the breaker."""
        try:
            replies = await self._client.run(commands, min(self._stall_s, limit_s))
        except FAULTS as error:
            self._fail(error)
            return []
        self._errors += sum(_refused(reply) for reply in replies)
        return replies

    def _fail(self, error: Exception) -> None:
        self._errors += 1
        self._index.clear()
        if self._breaker.failed():
            _log.warning(
                "redis_tier.lost",
                address=self._client.address,
                reason=str(error) or f"no answer within {self._stall_s:g} s",
                hint="blocks are neither looked up nor stored there until it answers again",
            )


def _refused(reply: Any) -> bool:
    """An error that says nothing about what the key holds: no permission, no memory, read-only."""
    return isinstance(reply, ResponseError) and not str(reply).startswith("WRONGTYPE")
