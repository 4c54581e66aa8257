"""What both kernel sets ask of a copy between blocks of a pool and a buffer, see `interface.Kernels`."""

from __future__ import annotations

import torch


def paired_heads(
    pool: torch.Tensor,
    block_ids: torch.Tensor,
    buffer: torch.Tensor,
    heads: range | None,
    buffer_heads: range | None,
) -> tuple[range, range]:
    """The heads of the pool and of the buffer, given or all. Raises ValueError as the interface says."""
    ours, theirs = pool.shape, buffer.shape
    fits = ours[1] == theirs[1] and ours[3:] == theirs[3:] and len(block_ids) == theirs[0]
    if not fits or buffer.dtype != pool.dtype:
        raise ValueError(
            f"{len(block_ids)} blocks of {tuple(ours)} of {pool.dtype} do not fit a buffer {tuple(theirs)} "
            f"of {buffer.dtype}"
        )
    if not (buffer[0].is_contiguous() and pool[0].is_contiguous()):
        raise ValueError(f"each block must be dense, got strides {pool.stride()} and {buffer.stride()}")
    chosen = _run(heads, ours[2])
    partners = _run(buffer_heads, theirs[2])
    if len(chosen) != len(partners):
        raise ValueError(f"{len(chosen)} heads of the pool do not fit {len(partners)} of the buffer")
    return chosen, partners


def _run(heads: range | None, count: int) -> range:
    if heads is None:
        return range(count)
    if heads.step != 1 or not 0 <= heads.start < heads.stop <= count:
        raise ValueError(f"heads {heads} are no run of {count} KV heads")
    return heads
