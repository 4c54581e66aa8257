"""The paged pool's bookkeeping: which block is whose, which content it holds, which may be re-used.

Every block is in exactly one of four states:

    blank        unreferenced, content unknown          allocate first
    cached       unreferenced, content known by hash    allocate last, oldest first (LRU)
    referenced   held by >= 1 sequences                 never allocated
    quarantined  given up by its owner while a transfer may still write into it

               allocate            release (no hash)
      blank ------------> referenced ---------------> blank
                           |  ^  \\ release (hash)
                quarantine |  |   `------------------> cached -- evict --> (allocated again)
                           v  `------- acquire -------'
                     quarantined -- quiet --> blank

Counting and moving happen together in one thread (the engine's); there is no lock.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass


class NoFreeBlocks(Exception):
    """Fewer unreferenced blocks than asked for; nothing was changed."""


@dataclass(frozen=True, slots=True)
class _Content:
    """What a cached block holds. Index and tokens are compared on a hit, the hash alone is not trusted."""

    block_hash: bytes
    index: int
    token_ids: tuple[int, ...]


class BlockPool:
    """Allocation, reference counts and the prefix cache of one worker's pool.

    `on_evict` is told the hash of every content that had to make room.
    """

    def __init__(
        self, num_blocks: int, *, caching: bool = True, on_evict: Callable[[bytes], None] = lambda _: None
    ) -> None:
        self.num_blocks = num_blocks
        self.caching = caching
        self._on_evict = on_evict
        self.num_evicted = 0
        self._refs = [0] * num_blocks
        self._content: list[_Content | None] = [None] * num_blocks
        self._by_hash: dict[bytes, int] = {}
        self._blank: deque[int] = deque(range(num_blocks))
        self._cached: OrderedDict[int, None] = OrderedDict()
        self._quarantined: set[int] = set()

    @property
    def num_free(self) -> int:
        """Unreferenced blocks, the cached ones included."""
        return len(self._blank) + len(self._cached)

    @property
    def num_cached(self) -> int:
        """Unreferenced blocks whose content may be hit."""
        return len(self._cached)

    @property
    def num_quarantined(self) -> int:
        return len(self._quarantined)

    def refs(self, block_id: int) -> int:
        return self._refs[block_id]

    def allocate(self, count: int) -> list[int]:
        """`count` blocks with one reference each and unknown content. Raises NoFreeBlocks."""
        if count > self.num_free:
            raise NoFreeBlocks(f"{count} blocks wanted, {self.num_free} free")
        taken = []
        for _ in range(count):
            block_id = self._blank.popleft() if self._blank else self._evict_oldest()
            self._refs[block_id] = 1
            taken.append(block_id)
        return taken

    def acquire(self, block_ids: Iterable[int]) -> None:
        """One more reference to each; they must hold content or be referenced already."""
        for block_id in block_ids:
            if self._refs[block_id] == 0:
                del self._cached[block_id]
            self._refs[block_id] += 1

    def release(self, block_ids: Sequence[int]) -> None:
        """One reference less to each, in chain order; the tail becomes the next to be evicted."""
        for block_id in reversed(block_ids):
            if self._refs[block_id] <= 0:
                raise AssertionError(f"block {block_id} released more often than acquired")
            self._refs[block_id] -= 1
            if self._refs[block_id] == 0:
                if self._content[block_id] is None:
                    self._blank.append(block_id)
                else:
                    self._cached[block_id] = None

    def quarantine(self, block_ids: Iterable[int]) -> None:
        """Give up sole ownership of blocks that a transfer may still write into."""
        for block_id in block_ids:
            if self._refs[block_id] != 1 or self._content[block_id] is not None:
                raise AssertionError(f"block {block_id} is shared or committed, it cannot be quarantined")
            self._refs[block_id] = 0
            self._quarantined.add(block_id)

    def quiet(self, block_ids: Iterable[int]) -> None:
        """The transport says that nothing touches these any more. Idempotent."""
        for block_id in block_ids:
            if block_id in self._quarantined:
                self._quarantined.remove(block_id)
                self._blank.append(block_id)

    def commit(self, block_id: int, block_hash: bytes, index: int, token_ids: tuple[int, ...]) -> bool:
        """Block `block_id` now holds the KV of block `index` of a prompt with this chain hash.

        False when it is not entered: another block holds the same content already and stays the one
        to hit, or there is no caching.
        """
        if not self.caching or block_hash in self._by_hash or self._content[block_id] is not None:
            return False
        self._content[block_id] = _Content(block_hash, index, token_ids)
        self._by_hash[block_hash] = block_id
        return True

    def match(self, hashes: Sequence[bytes], token_ids: Sequence[int], block_size: int) -> list[int]:
        """The longest chain of blocks held for these leading hashes; changes nothing."""
        found: list[int] = []
        for index, block_hash in enumerate(hashes):
            block_id = self._by_hash.get(block_hash)
            if block_id is None:
                break
            content = self._content[block_id]
            expected = tuple(token_ids[index * block_size : (index + 1) * block_size])
            if content is None or content.index != index or content.token_ids != expected:
                break
            found.append(block_id)
        return found

    def check(self) -> None:
        """Raise AssertionError unless every block is in exactly one state (for tests)."""
        referenced = {i for i, refs in enumerate(self._refs) if refs > 0}
        groups = [set(self._blank), set(self._cached), referenced, self._quarantined]
        if sum(map(len, groups)) != self.num_blocks or len(set().union(*groups)) != self.num_blocks:
            raise AssertionError(f"blocks are lost or doubled: {[sorted(g) for g in groups]}")
        if any(self._content[i] is not None for i in self._blank):
            raise AssertionError("a blank block has content")

    def _evict_oldest(self) -> int:
        block_id, _ = self._cached.popitem(last=False)
        content = self._content[block_id]
        assert content is not None
        del self._by_hash[content.block_hash]
        self._content[block_id] = None
        self.num_evicted += 1
        self._on_evict(content.block_hash)
        return block_id
