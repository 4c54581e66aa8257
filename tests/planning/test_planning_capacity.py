"""The KV account as tables: what is given, what fits, and the sentences when nothing does."""

from __future__ import annotations

import re

import pytest

from core.errors import ConfigError
from planning.capacity import MemoryUse, given_num_blocks, num_blocks_within

GIB = 2**30
GPU = MemoryUse(total=80 * GIB, free=60 * GIB, weights=16 * GIB, activations=2 * GIB, reserve=GIB)


@pytest.mark.parametrize(
    ("num_blocks", "nbytes", "blocks"),
    [(None, None, None), (7, None, 7), (7, 10_000, 7), (None, 1000, 10), (None, 1099, 10), (2, None, 2)],
)
def test_blocks_come_before_bytes(num_blocks: int | None, nbytes: int | None, blocks: int | None) -> None:
    assert given_num_blocks(num_blocks, nbytes, 100) == blocks


def test_too_few_bytes_are_refused() -> None:
    says = "--kv-cache-memory-bytes 199 holds 1 blocks of 100 bytes; give at least 200"
    with pytest.raises(ConfigError, match=re.escape(says)):
        given_num_blocks(None, 199, 100)


@pytest.mark.parametrize(
    ("use", "utilization", "gib"),
    [
        (GPU, 0.9, 72 - 19),
        (GPU, 0.5, 40 - 19),
        (MemoryUse(80 * GIB, 30 * GIB, 16 * GIB, 2 * GIB, GIB), 0.9, 27),  # another process holds the rest
        (MemoryUse(16 * GIB, 15 * GIB, 0, GIB, 0), 0.5, 7),  # a CPU
        (MemoryUse(16 * GIB, 15 * GIB, 0, GIB, 0), 1.0, 14),
    ],
)
def test_the_pool_gets_what_is_left(use: MemoryUse, utilization: float, gib: int) -> None:
    assert num_blocks_within(use, utilization, 2**20) == gib * 1024


def test_a_part_of_a_block_is_no_block() -> None:
    assert num_blocks_within(MemoryUse(1000, 1000, 0, 0, 0), 1.0, 300) == 3


@pytest.mark.parametrize(
    ("use", "utilization", "says"),
    [
        (
            GPU,
            0.2,
            "--gpu-memory-utilization gives this worker 16.00 GiB of 80.00 GiB: weights (16.00 GiB), activations "
            "(2.00 GiB) and a reserve of 1.00 GiB leave 0.00 GiB for the KV pool, 2 blocks need 0.00 GiB; raise "
            "it, or lower --max-num-batched-tokens or --max-num-seqs",
        ),
        (
            MemoryUse(80 * GIB, 3 * GIB // 2, 16 * GIB, 2 * GIB, GIB),
            0.9,
            "1.50 GiB of 80.00 GiB are free, a step takes 2.00 GiB of that and 1.00 GiB stay in reserve; no room",
        ),
        (
            MemoryUse(80 * GIB, 3 * GIB, 16 * GIB, 2 * GIB, GIB),  # as much as a step and the reserve take
            0.9,
            "3.00 GiB of 80.00 GiB are free, a step takes 2.00 GiB of that",
        ),
    ],
)
def test_the_refusal_says_where_the_memory_went(use: MemoryUse, utilization: float, says: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(says)):
        num_blocks_within(use, utilization, 2**20)
