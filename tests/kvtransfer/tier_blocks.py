"""Blocks for tests of the lower tiers: known hashes, known payloads."""

import numpy as np
from blake3 import blake3

from kvtransfer.tier import Tier

NAMESPACE = blake3(b"model").digest()
OTHER_NAMESPACE = blake3(b"other model").digest()
BLOCK_NBYTES = 24 * 1024 + 64  # not whole pages

Block = tuple[bytes, memoryview]


def blocks(count: int, seed: int = 0, nbytes: int = BLOCK_NBYTES) -> list[Block]:
    """`count` blocks of random bytes, the same for the same seed. Their hashes begin with one of two
    bytes, so that they fill two directories of the disk tier."""
    rng = np.random.default_rng(seed)
    digests = [blake3(f"{seed} {i}".encode()).digest() for i in range(count)]
    return [(bytes([i % 2]) + digest[1:], memoryview(rng.bytes(nbytes))) for i, digest in enumerate(digests)]


def hashes(of: list[Block]) -> list[bytes]:
    return [block_hash for block_hash, _ in of]


def buffers(count: int, nbytes: int = BLOCK_NBYTES) -> list[memoryview]:
    return [memoryview(bytearray(nbytes)) for _ in range(count)]


async def loaded(tier: Tier, wanted: list[Block]) -> int:
    """Load these blocks; the number that came, each compared byte by byte."""
    into = buffers(len(wanted), len(wanted[0][1]))
    number = await tier.load(hashes(wanted), into)
    for (_, payload), buffer in zip(wanted[:number], into[:number], strict=True):
        assert buffer == payload
    return number
