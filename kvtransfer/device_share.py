"""GPU memory of one process of a worker, made visible to another: CUDA IPC, through torch.

A tensor-parallel rank allocates its pool on its own GPU. Rank 0 hands blocks over for all ranks, so it maps
the others' pools, as it maps their memory on a CPU. Both processes must see the same GPUs in the same order.
What was mapped cannot be shared once more (so NIXL cannot offer it), and ends with the process that allocated
it.
"""

from __future__ import annotations

import json
from typing import Any

import torch

_FIELDS = (
    "device",
    "handle",
    "nbytes",
    "offset",
    "ref_counter_handle",
    "ref_counter_offset",
    "event_handle",
    "event_sync_required",
)
"""What torch's `_share_cuda_` gives and its `_new_shared_cuda` takes, in order; some are bytes."""


def exported(blocks: torch.Tensor) -> bytes:
    """How another process reaches this tensor's memory, as JSON. The tensor begins its storage."""
    return encode(blocks.untyped_storage()._share_cuda_())


def opened(message: bytes, num_blocks: int, block_nbytes: int) -> torch.Tensor:
    """uint8 `[num_blocks, block_nbytes]` over the memory that another process exported."""
    shared = decode(message)
    storage = torch.UntypedStorage._new_shared_cuda(*shared)
    empty: Any = torch.empty(0, dtype=torch.uint8, device=torch.device("cuda", shared[0]))
    return empty.set_(storage, 0, (num_blocks, block_nbytes))


def encode(shared: tuple[Any, ...]) -> bytes:
    values = ({"hex": each.hex()} if isinstance(each, bytes) else each for each in shared)
    return json.dumps(dict(zip(_FIELDS, values, strict=True))).encode()


def decode(message: bytes) -> tuple[Any, ...]:
    found = json.loads(message)
    values = (found[name] for name in _FIELDS)
    return tuple(bytes.fromhex(each["hex"]) if isinstance(each, dict) else each for each in values)
