"""What a worker takes and holds: shown in its log at start, and by its probes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import psutil

from core import log

_log = log.get("worker")


@dataclass(frozen=True, slots=True)
class Footprint:
    """All ranks of a tensor-parallel worker together.

    `activations_nbytes`: the peak of the largest step. `other_nbytes`: host memory besides weights and pool.
    `concurrency`: sequences of the greatest length that the pool holds.
    """

    device: str
    dtype: str
    dtype_reason: str
    quantization: str
    tensor_parallel_size: int
    weights_nbytes: int
    activations_nbytes: int
    other_nbytes: int
    kv_nbytes: int
    num_blocks: int
    num_tokens: int
    max_model_len: int
    concurrency: float
    kv_dtype: str
    bytes_per_token: int
    load_s: float


def announce(footprint: Footprint, model: str) -> None:
    """The log lines of a worker that is loaded."""
    _log.info(
        "worker.loaded",
        model=model,
        dtype=footprint.dtype,
        dtype_reason=footprint.dtype_reason,
        quantization=footprint.quantization,
        ranks=footprint.tensor_parallel_size,
        device=footprint.device,
        weights=footprint.weights_nbytes,
        activations=footprint.activations_nbytes,
        kv=footprint.kv_nbytes,
        blocks=footprint.num_blocks,
        tokens=footprint.num_tokens,
        concurrency=footprint.concurrency,
    )
    if footprint.num_tokens < footprint.max_model_len:
        _log.warning(
            "worker.small_pool",
            tokens=footprint.num_tokens,
            max_model_len=footprint.max_model_len,
            hint="longer requests are refused; give more --kv-cache-memory-bytes or less --max-model-len",
        )


def other_nbytes(others: Sequence[int], known_nbytes: int) -> int:
    """Host memory of this process, and what these have for themselves, beyond the known."""
    own = [psutil.Process(pid).memory_info() for pid in others]
    here = psutil.Process().memory_info().rss
    return max(0, here + sum(each.rss - each.shared for each in own) - known_nbytes)
