"""Blocks in host RAM: one arena of equal slots, the only gateway between the device and what lies below.

Every slot is in exactly one of four states:

    free       content unknown                                   taken first
    filling    taken for a copy or a load, not to be found yet   never taken
    held       content known by hash, unpinned                   taken last, coldest first (LRU)
    pinned     held, and being read or kept                      never taken

             take                publish             pin
      free ---------> filling ------------> held <---------> pinned
        ^                | give back          |     unpin
        `----------------+------- evict ------'

Within one chain the tail counts as colder than the head: a head without its tail is a shorter hit, a tail
without its head is none. Bytes are copied without the lock and with the GIL released; the lock covers the
books only. Any thread may call anything. Nobody here copies: slots are filled and read by whoever asked.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from time import perf_counter

from kvtransfer.arena import Arena
from kvtransfer.tier import OnChange, TierStats, unheard


@dataclass(slots=True, eq=False)
class _Entry:
    slot: int
    pins: int = 0


class HostTier:
    """`capacity_nbytes` is rounded down to whole blocks. `on_evict(block_hash)` is told of each block that
    had to make room, on the thread that needed the room and without the lock; it must not wait. `on_change`
    is called with the lock held: only so is the order of what it hears the order of what happened.

    Raises ConfigError when not even one block fits, or this machine has not that much free memory.
    """

    name = "host"

    def __init__(self, capacity_nbytes: int, block_nbytes: int, on_change: OnChange = unheard) -> None:
        self.block_nbytes = block_nbytes
        self._arena = Arena(capacity_nbytes // block_nbytes, block_nbytes)
        self.on_evict: Callable[[bytes], None] = lambda _: None
        self._on_change = on_change
        self._lock = threading.Lock()
        self._free = list(range(self._arena.num_slots))
        self._entries: dict[bytes, _Entry] = {}
        self._cold_first: OrderedDict[bytes, None] = OrderedDict()  # the unpinned ones
        self._filling: set[int] = set()
        self._queries = self._hits = self._evictions = self._dropped = 0
        self._load_nbytes = self._store_nbytes = 0
        self._load_s = self._store_s = 0.0

    @property
    def num_slots(self) -> int:
        return self._arena.num_slots

    @property
    def memory(self) -> memoryview:
        """All slots, for a pool that wants them pinned."""
        return self._arena.memory

    @property
    def num_free(self) -> int:
        return len(self._free)

    # Reading and writing blocks.

    def load(self, hashes: Sequence[bytes], write: Callable[[Sequence[memoryview]], None]) -> int:
        """Give the leading blocks that are held to `write`, pinned meanwhile; returns how many there were."""
        held = hashes[: self.pin(hashes)]
        started = perf_counter()
        try:
            if held:
                write([self.view(block_hash) for block_hash in held])
        finally:
            self.unpin(held)
        with self._lock:
            self._load_s += perf_counter() - started
            self._load_nbytes += len(held) * self.block_nbytes
        return len(held)

    def view(self, block_hash: bytes) -> memoryview:
        """The bytes of a block that the caller has pinned; valid until it unpins. Raises KeyError."""
        return self._arena.slot(self._entries[block_hash].slot)

    # Finding and keeping blocks.

    def lookup(self, hashes: Sequence[bytes]) -> int:
        """How many leading blocks are held; they count as just used."""
        with self._lock:
            held = hashes[: self._leading(hashes)]
            self._queries += len(hashes)
            self._hits += len(held)
            self._touch(held)
        return len(held)

    def holds(self, block_hash: bytes) -> bool:
        return block_hash in self._entries

    def touch(self, hashes: Sequence[bytes]) -> None:
        """The blocks of this chain that are held were just used, its tail longest ago."""
        with self._lock:
            self._touch(hashes)

    def pin(self, hashes: Sequence[bytes]) -> int:
        """Keep the leading blocks that are held until `unpin`; counted. Returns how many they are."""
        with self._lock:
            held = hashes[: self._leading(hashes)]
            for block_hash in held:
                self._entries[block_hash].pins += 1
                self._cold_first.pop(block_hash, None)
        return len(held)

    def unpin(self, hashes: Sequence[bytes]) -> None:
        """Undo one `pin` of each; in chain order, so that the tail becomes the colder end."""
        with self._lock:
            for block_hash in reversed(hashes):
                entry = self._entries[block_hash]
                if entry.pins <= 0:
                    raise AssertionError(f"block {block_hash.hex()} was unpinned more often than pinned")
                entry.pins -= 1
                if not entry.pins:
                    self._cold_first[block_hash] = None

    def pin_coldest(self, count: int) -> list[bytes]:
        """Pin up to `count` blocks that would have to go next, coldest first."""
        with self._lock:
            coldest = [block_hash for block_hash, _ in zip(self._cold_first, range(count), strict=False)]
            for block_hash in coldest:
                self._entries[block_hash].pins += 1
                del self._cold_first[block_hash]
        return coldest

    def evict(self, block_hash: bytes) -> bool:
        """Free an unpinned block's slot; False when it is pinned or not held."""
        with self._lock:
            entry = self._entries.get(block_hash)
            if entry is None or entry.pins:
                return False
            self._free.append(self._forget(block_hash))
            self._on_change((), (block_hash,))
        return True

    # Landing: slots that somebody else fills.

    def take(self, count: int) -> list[int]:
        """`count` slots to fill, evicting as needed, or none at all when so many cannot be had.

        Each must come back by `publish` or `give_back`.
        """
        evicted: list[bytes] = []
        with self._lock:
            if count > len(self._free) + len(self._cold_first):
                self._dropped += count
                return []
            while len(self._free) < count:
                coldest = next(iter(self._cold_first))
                evicted.append(coldest)
                self._free.append(self._forget(coldest))
            slots = [self._free.pop() for _ in range(count)]
            self._filling.update(slots)
            if evicted:
                self._on_change((), evicted)
        for block_hash in evicted:
            self.on_evict(block_hash)
        return slots

    def slot(self, slot: int) -> memoryview:
        """The writable bytes of a taken slot."""
        return self._arena.slot(slot)

    def reserve(self, hashes: Sequence[bytes]) -> tuple[list[int], list[int]]:
        """Which of these blocks are missing, as places in `hashes`, and a slot to fill for each.

        Those that are held count as just used. Where slots are short, the last ones are given up (`dropped`).
        Each slot must come back by `publish` or `give_back`.
        """
        with self._lock:
            missing = []
            for i, block_hash in enumerate(hashes):
                if block_hash in self._entries:
                    self._touch((block_hash,))
                else:
                    missing.append(i)
            room = min(len(missing), len(self._free) + len(self._cold_first))
            self._dropped += len(missing) - room
        slots = self.take(room)
        return missing[: len(slots)], slots

    def stored(self, count: int, seconds: float) -> None:
        """Account for blocks that were copied out of the pool into reserved slots."""
        with self._lock:
            self._store_s += seconds
            self._store_nbytes += count * self.block_nbytes

    def publish(self, hashes: Sequence[bytes], slots: Sequence[int]) -> None:
        """The taken `slots` now hold these blocks of one chain; doubles are given back."""
        fresh: list[bytes] = []
        with self._lock:
            for block_hash, slot in reversed(list(zip(hashes, slots, strict=True))):
                self._filling.remove(slot)
                if block_hash in self._entries:
                    self._free.append(slot)
                else:
                    self._entries[block_hash] = _Entry(slot)
                    self._cold_first[block_hash] = None
                    fresh.append(block_hash)
            if fresh:
                self._on_change(fresh, ())

    def give_back(self, slots: Sequence[int]) -> None:
        """The taken `slots` were not filled; nothing may write into them any more."""
        with self._lock:
            self._filling.difference_update(slots)
            self._free.extend(slots)

    def stats(self) -> TierStats:
        with self._lock:
            return TierStats(
                queries=self._queries,
                hits=self._hits,
                load_nbytes=self._load_nbytes,
                load_s=self._load_s,
                store_nbytes=self._store_nbytes,
                store_s=self._store_s,
                evictions=self._evictions,
                dropped=self._dropped,
                used_nbytes=len(self._entries) * self.block_nbytes,
                capacity_nbytes=self.num_slots * self.block_nbytes,
                num_blocks=len(self._entries),
            )

    def check(self) -> None:
        """Raise AssertionError unless every slot is in exactly one state (for tests)."""
        with self._lock:
            pinned = {h for h, entry in self._entries.items() if entry.pins}
            slots = [*self._free, *self._filling, *(entry.slot for entry in self._entries.values())]
            if sorted(slots) != list(range(self.num_slots)):
                raise AssertionError(f"slots are lost or doubled: {sorted(slots)}")
            if pinned | set(self._cold_first) != set(self._entries) or pinned & set(self._cold_first):
                raise AssertionError("a held block is neither or both of pinned and evictable")

    # With the lock held.

    def _leading(self, hashes: Sequence[bytes]) -> int:
        return next((i for i, h in enumerate(hashes) if h not in self._entries), len(hashes))

    def _touch(self, hashes: Sequence[bytes]) -> None:
        for block_hash in reversed(hashes):
            if block_hash in self._cold_first:
                self._cold_first.move_to_end(block_hash)

    def _forget(self, block_hash: bytes) -> int:
        del self._cold_first[block_hash]
        self._evictions += 1
        return self._entries.pop(block_hash).slot
