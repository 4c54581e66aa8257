"""Block identity: the same bytes in every process, another for anything that differs."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from core.blocks import BlockHasher, hash_blocks, num_blocks_for, num_shareable_blocks

TOKENS = list(range(1000, 1040))


def test_known_answer() -> None:
    """A change of these bytes orphans every stored block: it needs a new layout version."""
    first, second = hash_blocks(b"namespace", TOKENS[:32], 16, "salt")
    assert first.hex() == "605656f7c2ce02a3f0d3af30adff46098a320032131cc942be5083c61211fbab"
    assert second.hex() == "a6b01d433ac54898dac1d74144b47e482c0802abf2329cf20e33637531e46d17"


def test_equal_in_processes_with_other_hash_seeds() -> None:
    code = "from core.blocks import hash_blocks; print(hash_blocks(b'n', list(range(40)), 16, 's')[-1].hex())"
    seen = {
        subprocess.run(
            [sys.executable, "-c", code],
            env=os.environ | {"PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("0", "1", "77")
    }
    assert seen == {hash_blocks(b"n", list(range(40)), 16, "s")[-1].hex() + "\n"}


def test_everything_that_differs_shows() -> None:
    base = hash_blocks(b"n", TOKENS, 8)
    others = [
        hash_blocks(b"m", TOKENS, 8),
        hash_blocks(b"n", TOKENS, 8, "tenant"),
        hash_blocks(b"n", [1, *TOKENS[1:]], 8),
        hash_blocks(b"n", TOKENS[8:], 8),
    ]
    for other in others:
        assert not set(base) & set(other)
    assert hash_blocks(b"ab", TOKENS, 8, "c") != hash_blocks(b"a", TOKENS, 8, "bc"), (
        "fields are typed, not glued"
    )


@given(
    st.lists(st.integers(0, 2**32 - 1), max_size=100),
    st.lists(st.integers(0, 100), max_size=30),
    st.sampled_from([8, 16]),
)
def test_incremental_equals_at_once(tokens: list[int], cuts: list[int], size: int) -> None:
    hasher, at = BlockHasher(b"n", "", size), 0
    for cut in cuts:
        hasher.extend(tokens[at : at + cut])
        at += cut
    hasher.extend(tokens[at:])
    assert hasher.hashes == hash_blocks(b"n", tokens, size)
    fork = hasher.copy()
    fork.extend([7] * size)
    assert len(hasher.hashes) == len(tokens) // size, "a copy goes its own way"


@pytest.mark.parametrize(
    ("tokens", "shareable", "blocks"), [(1, 0, 1), (15, 0, 1), (16, 0, 1), (17, 1, 2), (32, 1, 2), (33, 2, 3)]
)
def test_arithmetic_at_the_borders(tokens: int, shareable: int, blocks: int) -> None:
    assert num_shareable_blocks(tokens, 16) == shareable
    assert num_blocks_for(tokens, 16) == blocks
