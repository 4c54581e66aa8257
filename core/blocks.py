"""Chained block hashes: the identity of a full KV block, the same bytes in every process.

    h_-1 = blake3("baton-kv" | namespace digest | cache salt)
    h_i  = blake3(h_{i-1} | token ids of block i as little-endian uint32)

Every variable part is typed and length-prefixed, so that no salt can imitate another field. Only
full blocks have a hash. Python's `hash()` is salted per process and never used here.
"""

from __future__ import annotations

import struct
import sys
from array import array
from collections.abc import Sequence

from blake3 import blake3

TOKEN_NBYTES = 4


def _root(namespace: bytes, cache_salt: str) -> bytes:
    salt = cache_salt.encode()
    head = struct.pack("<II", len(namespace), len(salt))
    return blake3(b"baton-kv" + head + namespace + salt).digest()


def _token_bytes(token_ids: Sequence[int]) -> bytes:
    numbers = array("I", token_ids)
    if sys.byteorder == "big":
        numbers.byteswap()
    return numbers.tobytes()


class BlockHasher:
    """Hashes a growing token sequence block by block; each token is hashed once.

    `hashes` holds the hashes of the full blocks seen so far.
    """

    def __init__(self, namespace: bytes, cache_salt: str, block_size: int) -> None:
        self._block_nbytes = TOKEN_NBYTES * block_size
        self._last = _root(namespace, cache_salt)
        self._tail = b""
        self.hashes: list[bytes] = []

    def copy(self) -> BlockHasher:
        """An independent hasher at the same place, for a fork of the sequence."""
        other = object.__new__(BlockHasher)
        other._block_nbytes, other._last = self._block_nbytes, self._last
        other._tail, other.hashes = self._tail, list(self.hashes)
        return other

    def extend(self, token_ids: Sequence[int]) -> list[bytes]:
        """Append tokens; returns the hashes of blocks that became full through them."""
        tail, size, last, fresh = self._tail + _token_bytes(token_ids), self._block_nbytes, self._last, []
        ends = len(tail) - len(tail) % size
        for begin in range(0, ends, size):
            last = blake3(last + tail[begin : begin + size]).digest()
            fresh.append(last)
        self._tail, self._last = tail[ends:], last
        self.hashes += fresh
        return fresh


def hash_blocks(
    namespace: bytes, token_ids: Sequence[int], block_size: int, cache_salt: str = ""
) -> list[bytes]:
    """Hashes of all full blocks of `token_ids` (32 bytes each), in order."""
    hasher = BlockHasher(namespace, cache_salt, block_size)
    hasher.extend(token_ids)
    return hasher.hashes


def num_shareable_blocks(num_prompt_tokens: int, block_size: int) -> int:
    """Full blocks of a prompt that may come from elsewhere: floor((n-1)/block_size).

    At least one token is always left to compute, since its logits give the first new token.
    """
    return max(0, num_prompt_tokens - 1) // block_size


def num_blocks_for(num_tokens: int, block_size: int) -> int:
    """Blocks that hold `num_tokens` tokens: ceil(n/block_size)."""
    return -(-num_tokens // block_size)


def block_key(block_hash: bytes) -> int:
    """A short name of a block for events and routing: the first 8 bytes of its hash, little-endian."""
    return int.from_bytes(block_hash[:8], "little")
