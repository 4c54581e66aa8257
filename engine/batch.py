"""One step's work, flattened: every new token of every sequence is one row.

    chunks as scheduled      A: 1 token   B: 4 tokens   C: 1 token
    rows of the batch        A0 C0 | B0 B1 B2 B3           single tokens first
    q_starts                 0  1  2              6

Single-token chunks (decodes) come first, so that kernels treat them as one slice. `logits_rows`
keeps the order of the chunks, so callers never see the reordering.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from core.blocks import num_blocks_for


@dataclass(frozen=True, slots=True)
class Chunk:
    """New tokens of one sequence in one step.

    `start` is the position of the first one; everything before it is already in the blocks.
    `block_table` holds the ids of the blocks that cover positions 0 .. start + len - 1 (more are
    ignored). `logits_from`: index in `token_ids` of the first token whose logits are wanted, to the
    chunk's end: len - 1 = the last one only, 0 = all, None = none.
    """

    token_ids: Sequence[int]
    start: int
    block_table: Sequence[int]
    logits_from: int | None = None

    def __len__(self) -> int:
        return len(self.token_ids)


@dataclass(frozen=True, slots=True)
class Batch:
    """Tensors of one step: T rows (new tokens) of S sequences, R rows of logits.

    The first `num_decodes` sequences have one row each; sequence i owns rows
    `q_starts[i] : q_starts[i + 1]` and attends to its first `kv_lens[i]` tokens.
    """

    token_ids: torch.Tensor
    """int64 [T]"""
    positions: torch.Tensor
    """int64 [T]"""
    slots: torch.Tensor
    """int64 [T]: block id * block_size + offset, where the row's K and V are written"""
    q_starts: tuple[int, ...]
    """S + 1 row numbers"""
    row_starts: torch.Tensor
    """int32 [S + 1]: `q_starts` for kernels"""
    kv_lens: torch.Tensor
    """int32 [S]: tokens of the sequence after this step"""
    block_tables: torch.Tensor
    """int32 [S, widest], padded with 0"""
    logits_rows: torch.Tensor
    """int64 [R]: rows whose logits are wanted, in the order of the chunks"""
    num_decodes: int
    block_size: int

    @property
    def num_tokens(self) -> int:
        return self.token_ids.shape[0]

    @property
    def num_seqs(self) -> int:
        return len(self.q_starts) - 1

    @classmethod
    def build(cls, chunks: Sequence[Chunk], block_size: int) -> Batch:
        """Flatten `chunks`. Raises ValueError for an empty one or a block table that is too short."""
        if not chunks:
            raise ValueError("a batch needs at least one chunk")
        given_lens = np.fromiter(map(len, chunks), np.int64, len(chunks))
        order = np.argsort(given_lens > 1, kind="stable")
        ordered = [chunks[i] for i in order]
        lens = given_lens[order]
        starts = np.fromiter((chunk.start for chunk in ordered), np.int64, len(ordered))
        ends = np.cumsum(lens)
        kv_lens = starts + lens
        tables = _padded_tables(ordered, kv_lens, block_size)

        seq_of_row = np.repeat(np.arange(len(ordered)), lens)
        in_chunk = np.arange(ends[-1]) - np.repeat(ends - lens, lens)
        positions = starts[seq_of_row] + in_chunk
        blocks = tables[seq_of_row, positions // block_size].astype(np.int64)
        q_starts = (0, *ends.tolist())
        return cls(
            token_ids=torch.from_numpy(
                np.concatenate([np.asarray(chunk.token_ids, np.int64) for chunk in ordered])
            ),
            positions=torch.from_numpy(positions),
            slots=torch.from_numpy(blocks * block_size + positions % block_size),
            q_starts=q_starts,
            row_starts=torch.tensor(q_starts, dtype=torch.int32),
            kv_lens=torch.from_numpy(kv_lens.astype(np.int32)),
            block_tables=torch.from_numpy(tables),
            logits_rows=torch.from_numpy(_logits_rows(chunks, order, ends - lens)),
            num_decodes=int((lens == 1).sum()),
            block_size=block_size,
        )


def _padded_tables(chunks: Sequence[Chunk], kv_lens: np.ndarray, block_size: int) -> np.ndarray:
    needs = [num_blocks_for(int(kv_len), block_size) for kv_len in kv_lens]
    tables = np.zeros((len(chunks), max(needs)), np.int32)
    for row, chunk, need in zip(tables, chunks, needs, strict=True):
        if not len(chunk):
            raise ValueError("a chunk needs at least one token")
        if len(chunk.block_table) < need:
            raise ValueError(
                f"a chunk up to position {chunk.start + len(chunk)} needs {need} blocks, "
                f"its table has {len(chunk.block_table)}"
            )
        row[:need] = chunk.block_table[:need]
    return tables


def _logits_rows(chunks: Sequence[Chunk], order: np.ndarray, first_rows: np.ndarray) -> np.ndarray:
    first_of_chunk = np.empty_like(first_rows)
    first_of_chunk[order] = first_rows
    wanted = [
        np.arange(first + chunk.logits_from, first + len(chunk))
        for chunk, first in zip(chunks, first_of_chunk.tolist(), strict=True)
        if chunk.logits_from is not None
    ]
    return np.concatenate(wanted) if wanted else np.empty(0, np.int64)
