"""A step's batch as bytes, on its way to the other tensor-parallel ranks.

    6 numbers | token_ids | positions | slots | logits_rows | row_starts | kv_lens | block_tables
                int64                                         int32

The widest numbers come first, so that each lies on a multiple of its size.
"""

from __future__ import annotations

import math
import struct

import torch

from engine.batch import Batch

_HEAD = struct.Struct("<6q")  # tokens, sequences, rows of logits, width of the tables, decodes, block size


def encode(batch: Batch) -> bytes:
    """Of a batch whose tensors are in host memory."""
    num_logits, width = len(batch.logits_rows), batch.block_tables.shape[1]
    head = _HEAD.pack(
        batch.num_tokens, batch.num_seqs, num_logits, width, batch.num_decodes, batch.block_size
    )
    tensors = (
        batch.token_ids,
        batch.positions,
        batch.slots,
        batch.logits_rows,
        batch.row_starts,
        batch.kv_lens,
        batch.block_tables,
    )
    return b"".join((head, *(tensor.numpy().tobytes() for tensor in tensors)))


def decode(data: bytearray) -> Batch:
    """The batch over `data`, which must stay as it is."""
    num_tokens, num_seqs, num_logits, width, num_decodes, block_size = _HEAD.unpack_from(data)
    at = _HEAD.size

    def take(dtype: torch.dtype, *shape: int) -> torch.Tensor:
        nonlocal at
        count, start = math.prod(shape), at
        at += count * dtype.itemsize
        if not count:
            return torch.empty(shape, dtype=dtype)
        return torch.frombuffer(data, dtype=dtype, count=count, offset=start).view(shape)

    token_ids, positions, slots = (take(torch.int64, num_tokens) for _ in range(3))
    logits_rows = take(torch.int64, num_logits)
    row_starts, kv_lens = take(torch.int32, num_seqs + 1), take(torch.int32, num_seqs)
    return Batch(
        token_ids=token_ids,
        positions=positions,
        slots=slots,
        q_starts=tuple(row_starts.tolist()),
        row_starts=row_starts,
        kv_lens=kv_lens,
        block_tables=take(torch.int32, num_seqs, width),
        logits_rows=logits_rows,
        num_decodes=num_decodes,
        block_size=block_size,
    )
