"""A step's tensors on their way to the device: packed into one pinned buffer, one copy, then cut apart.

    token_ids | positions | slots | logits_rows | row_starts | kv_lens | block_tables      each on 64 bytes

Where each part lies follows from the shapes before it alone, so every batch of one shape fits the buffer of
another: a captured graph reads a buffer that the next batch of its shape is copied into. block_tables, whose
width differs, come last.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch

from engine.batch import Batch

_PARTS = ("token_ids", "positions", "slots", "logits_rows", "row_starts", "kv_lens", "block_tables")

_ALIGNMENT = 64
"""Bytes. Triton compiles a kernel anew for a pointer that is no multiple of 16."""


def upload(batch: Batch, device: torch.device, into: torch.Tensor | None = None) -> Batch:
    """`batch` with its tensors on `device`, over a new buffer or over `into` (uint8 [`packed_nbytes`]).

    The copy runs on the current stream and is not waited for. On the CPU without `into` the batch itself.
    """
    if device.type == "cpu" and into is None:
        return batch
    nbytes = packed_nbytes(batch)
    if into is None:
        into = torch.empty(nbytes, dtype=torch.uint8, device=device)
    if into.numel() != nbytes:
        raise ValueError(f"a buffer of {into.numel()} bytes does not fit a batch of {nbytes}")
    # The pinned allocator gives this memory to nobody else before the copy is done.
    packed = torch.empty(nbytes, dtype=torch.uint8, pin_memory=device.type == "cuda")
    for name, view in _views(packed, batch):
        view.copy_(getattr(batch, name))
    into.copy_(packed, non_blocking=True)
    return replace(batch, **dict(_views(into, batch)))


def packed_nbytes(batch: Batch) -> int:
    return sum(_padded(getattr(batch, name).nbytes) for name in _PARTS)


def _views(buffer: torch.Tensor, batch: Batch) -> Iterator[tuple[str, torch.Tensor]]:
    at = 0
    for name in _PARTS:
        part = getattr(batch, name)
        yield name, buffer[at : at + part.nbytes].view(part.dtype).view(part.shape)
        at += _padded(part.nbytes)


def _padded(nbytes: int) -> int:
    return -(-nbytes // _ALIGNMENT) * _ALIGNMENT
