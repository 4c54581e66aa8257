"""What sequences do with blocks: find cached ones, reserve, commit, copy on write, give back."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from core.blocks import num_blocks_for, num_shareable_blocks
from engine.block_pool import BlockPool, NoFreeBlocks
from engine.sequence import Sequence as Seq


class BlockStore(Protocol):
    """Where committed blocks live on outside the pool. Called on the engine's thread: must not wait."""

    def committed(self, hashes: Sequence[bytes], block_ids: Sequence[int], num_from_store: int) -> None:
        """These blocks of one chain are in the pool now; copy them before returning, or let them be.

        `num_from_store`: so many of them, the first ones, were loaded out of this store.
        """
        ...

    def evicted(self, block_hash: bytes) -> None:
        """The pool holds this content no longer."""
        ...

    def touched(self, hashes: Sequence[bytes]) -> None:
        """The leading blocks of a chain were hit in the pool."""
        ...

    def released(self, hashes: Sequence[bytes]) -> None:
        """A sequence gave back the blocks of this chain."""
        ...

    def park(self, hashes: Sequence[bytes]) -> int:
        """Pin the leading blocks that can be loaded back at any time; returns how many."""
        ...

    def unpark(self, hashes: Sequence[bytes]) -> None:
        """Undo `park` of exactly these blocks."""
        ...


class NoStore:
    """For a worker without tiers."""

    def committed(self, hashes: Sequence[bytes], block_ids: Sequence[int], num_from_store: int) -> None:
        pass

    def evicted(self, block_hash: bytes) -> None:
        pass

    def touched(self, hashes: Sequence[bytes]) -> None:
        pass

    def released(self, hashes: Sequence[bytes]) -> None:
        pass

    def park(self, hashes: Sequence[bytes]) -> int:
        return 0

    def unpark(self, hashes: Sequence[bytes]) -> None:
        pass


class Pager:
    """Moves blocks between one pool and its sequences; decides nothing about who runs."""

    def __init__(self, pool: BlockPool, block_size: int, store: BlockStore, sliding_window: int = 0) -> None:
        self.pool, self.block_size, self._store = pool, block_size, store
        self._sliding_window = sliding_window

    def lookup(self, seq: Seq) -> list[int]:
        """Cached blocks that start this sequence; changes nothing.

        At least one token is left to compute where a token is to be sampled. A request for its
        prompt's log probabilities reads no cache before its first token: it needs every row of logits.
        """
        if not self.pool.caching or (seq.request and seq.sampling.prompt_logprobs and not seq.num_output):
            return []
        return self.pool.match(seq.hasher.hashes[: self.num_reusable(seq)], seq.tokens, self.block_size)

    def num_reusable(self, seq: Seq) -> int:
        """How many leading blocks need not be computed, wherever they come from."""
        size, length = self.block_size, len(seq.tokens)
        return length // size if seq.is_prefill_job else num_shareable_blocks(length, size)

    def fits(self, seq: Seq, cached: list[int], spare: int) -> bool:
        """Whether the sequence can be reserved so that `spare` blocks stay free.

        One token beyond its own counts too, so that it is not admitted only to be preempted at once.
        """
        room = num_blocks_for(len(seq.tokens) + (not seq.is_prefill_job), self.block_size) - len(cached)
        # Cached blocks that nobody holds stop being free when they are acquired.
        idle = sum(self.pool.refs(block_id) == 0 for block_id in cached)
        return self.pool.num_free - idle - room >= spare

    def reserve(self, seq: Seq, cached: list[int]) -> None:
        """Give the sequence its cached blocks and fresh ones for all of its other tokens."""
        need = num_blocks_for(len(seq.tokens), self.block_size) - len(cached)
        self.pool.acquire(cached)
        if not seq.parked:  # coming back is no further use
            self._store.touched(seq.hasher.hashes[: len(cached)])
        seq.block_table = cached + self.pool.allocate(need)
        seq.num_computed = len(cached) * self.block_size
        seq.num_committed = len(cached)

    def has_slot(self, seq: Seq) -> bool:
        """Whether the next token may be written: its block exists and is this sequence's alone."""
        at = seq.num_computed // self.block_size
        return at < len(seq.block_table) and self.pool.refs(seq.block_table[at]) == 1

    def take_slot(self, seq: Seq) -> tuple[int, int] | None:
        """Make the next token writable; returns (src, dst) when a shared block has to be copied.

        Raises NoFreeBlocks, having changed nothing.
        """
        at = seq.num_computed // self.block_size
        (fresh,) = self.pool.allocate(1)
        if at == len(seq.block_table):
            seq.block_table.append(fresh)
            return None
        shared, seq.block_table[at] = seq.block_table[at], fresh
        self.pool.release([shared])
        return shared, fresh

    def commit(self, seq: Seq, num_stored: int = 0) -> None:
        """Enter the blocks that became full into the prefix cache; those before `num_stored` were loaded
        out of the store."""
        size, hashes = self.block_size, seq.hasher.hashes
        fresh: list[int] = []
        for i in range(seq.num_committed, seq.num_computed // size):
            tokens = tuple(seq.tokens[i * size : (i + 1) * size])
            if self.pool.commit(seq.block_table[i], hashes[i], i, tokens):
                fresh.append(i)
            seq.num_committed = i + 1
        if fresh:
            num_from_store = sum(i < num_stored for i in fresh)
            block_ids = [seq.block_table[i] for i in fresh]
            self._store.committed([hashes[i] for i in fresh], block_ids, num_from_store)

    def drop_fallen(self, seq: Seq) -> None:
        """Give back the blocks that lie before the sliding window of every token still to come.

        They must be committed before: as long as nobody needs the room, the prefix cache keeps them.
        A prefill job keeps its blocks, since a peer reads them all.
        """
        if not self._sliding_window or seq.is_prefill_job:
            return
        until = max(0, seq.num_computed + 1 - self._sliding_window) // self.block_size
        if until > seq.num_dropped:
            self.pool.release(seq.block_table[seq.num_dropped : until])
            seq.num_dropped = until

    def mark_arrived(self, seq: Seq, count: int, from_store: int) -> None:
        """The first `count` blocks of the sequence's load hold verified content, `from_store` of them out
        of the store."""
        computed = (seq.load_first + count) * self.block_size
        if computed > seq.num_computed:
            seq.num_computed = computed
            if seq.num_output == 0:
                seq.num_loaded = count * self.block_size
            self.commit(seq, seq.load_first + from_store)

    def park(self, seq: Seq) -> None:
        """Before its blocks go back: keep what it has computed loadable, until `unpark`."""
        hashes = seq.hasher.hashes[: seq.num_committed]
        seq.num_held = self._store.park(hashes)
        seq.parked = hashes[: seq.num_held]

    def unpark(self, seq: Seq) -> None:
        """It runs again, or is over. Idempotent."""
        self._store.unpark(seq.parked)
        seq.parked = []

    def replace(self, seq: Seq, unquiet: frozenset[int]) -> bool:
        """Quarantine blocks that may still be written into and put fresh ones in their place.

        False when there are none: the sequence then holds only its other blocks.
        """
        self.pool.quarantine(unquiet)
        try:
            fresh = iter(self.pool.allocate(len(unquiet)))
        except NoFreeBlocks:
            seq.block_table = [block_id for block_id in seq.block_table if block_id not in unquiet]
            return False
        seq.block_table = [next(fresh) if b in unquiet else b for b in seq.block_table]
        return True

    def give_back(self, seq: Seq) -> None:
        """The sequence holds nothing any more. Idempotent."""
        self._store.released(seq.hasher.hashes[: seq.num_committed])
        self.pool.release(seq.live_blocks)
        seq.block_table = []
        seq.num_computed = seq.num_committed = seq.num_dropped = 0
