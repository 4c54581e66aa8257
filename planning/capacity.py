"""How many KV blocks a worker gets: what its memory holds beside weights and activations.

|<---------------- share of the device that this worker may fill ---------------->|
| weights | activations of the largest step | reserve | KV pool                   |
"""

from __future__ import annotations

from dataclasses import dataclass

from core.errors import ConfigError

MIN_BLOCKS = 2
"""A sequence needs a block for its prompt and one to grow into."""

CPU_POOL_NBYTES = 2**30
"""The pool on a CPU where nothing is said about its size."""

GPU_UTILIZATION = 0.9
"""The share of a GPU where nothing is said about it."""

GPU_RESERVE_NBYTES = 768 * 2**20
"""For what no allocator counts: CUDA's context, code, libraries and fragmentation."""


@dataclass(frozen=True, slots=True)
class MemoryUse:
    """Bytes, after a profiling run.

    `total`: of the device, or on a CPU what was available when weights and libraries were loaded. `free`:
    what is left of it now. `weights` is 0 on a CPU: they are no part of that total.
    """

    total: int
    free: int
    weights: int
    activations: int
    reserve: int


def given_num_blocks(num_blocks: int | None, nbytes: int | None, block_nbytes: int) -> int | None:
    """The pool's blocks as `--num-blocks` says, else `--kv-cache-memory-bytes`; None when neither is given.

    Raises ConfigError when the bytes hold fewer than MIN_BLOCKS.
    """
    if num_blocks is not None or nbytes is None:
        return num_blocks
    fit = nbytes // block_nbytes
    if fit < MIN_BLOCKS:
        raise ConfigError(
            f"--kv-cache-memory-bytes {nbytes} holds {fit} blocks of {block_nbytes} bytes; "
            f"give at least {MIN_BLOCKS * block_nbytes}"
        )
    return fit


def num_blocks_within(use: MemoryUse, utilization: float, block_nbytes: int) -> int:
    """Blocks that fit when this worker may fill `utilization` (0-1) of the memory.

    What others hold bounds it too: the pool never takes more than is free. Raises ConfigError when fewer than
    MIN_BLOCKS fit.
    """
    share = int(use.total * utilization)
    to_come = use.activations + use.reserve
    ours = use.weights + to_come
    fit = min(share - ours, use.free - to_come) // block_nbytes
    if fit >= MIN_BLOCKS:
        return fit
    need = MIN_BLOCKS * block_nbytes
    if share - ours < need:
        raise ConfigError(
            f"--gpu-memory-utilization gives this worker {gib(share)} of {gib(use.total)}: weights "
            f"({gib(use.weights)}), activations ({gib(use.activations)}) and a reserve of {gib(use.reserve)} "
            f"leave {gib(max(0, share - ours))} for the KV pool, {MIN_BLOCKS} blocks need {gib(need)}; raise "
            "it, or lower --max-num-batched-tokens or --max-num-seqs"
        )
    raise ConfigError(
        f"{gib(use.free)} of {gib(use.total)} are free, a step takes {gib(use.activations)} of that and "
        f"{gib(use.reserve)} stay in reserve; no room for a KV pool of {MIN_BLOCKS} blocks ({gib(need)}); "
        "end what else uses this memory"
    )


def gib(nbytes: int) -> str:
    return f"{nbytes / 2**30:.2f} GiB"
