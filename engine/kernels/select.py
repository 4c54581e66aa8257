"""Chooses the kernel set for this machine."""

from __future__ import annotations

import os

from checkpoint.config import ModelConfig
from core import log
from core.errors import ConfigError
from core.kv import KVLayout
from engine.kernels.interface import Kernels
from engine.kernels.native import NativeKernels, unsupported
from engine.kernels.native_build import BuildFailed
from engine.kernels.torch_kernels import TorchKernels
from engine.models.dtype import KV_DTYPES, TORCH_DTYPES

_log = log.get("kernels")


def select_kernels(
    config: ModelConfig, layout: KVLayout, cache_dir: str | os.PathLike[str], deterministic: bool = False
) -> Kernels:
    """The native set where it can be built and fits the model, else plain torch; says which, and why.

    Raises ConfigError for `deterministic` where only plain torch is left: its sums depend on the batch.
    """
    reason = unsupported(config, layout)
    if not reason:
        try:
            kernels = NativeKernels(cache_dir, config.sliding_window)
        except (BuildFailed, OSError) as error:
            reason = str(error)
        else:
            _log.info("kernels.selected", name=kernels.name)
            return kernels
    if deterministic:
        raise ConfigError(
            f"--deterministic needs the native CPU kernels, which cannot run here: {reason}; "
            "install a C compiler and choose a model they serve, or leave --deterministic out"
        )
    _log.warning("kernels.selected", name=TorchKernels.name, reason=f"slower: {reason}")
    return TorchKernels(config.sliding_window)


def select_device_kernels(
    config: ModelConfig, layout: KVLayout, dtype: str, deterministic: bool = False
) -> Kernels:
    """The set for CUDA. Raises ConfigError without Triton, for heads that it has no kernel for, or for
    `deterministic`: the order of cuBLAS's sums depends on the number of rows.
    """
    if deterministic:
        raise ConfigError("--deterministic is not offered on a GPU; use --device cpu, or leave it out")
    try:
        from engine.kernels.triton import tuning
        from engine.kernels.triton.kernels import TritonKernels
    except ImportError as error:
        raise ConfigError(
            f"a GPU worker needs Triton, which cannot be loaded ({error}); "
            "install it with `pip install triton`, or use --device cpu"
        ) from None
    try:
        tuning.prefill_tile(config.head_dim, TORCH_DTYPES[dtype], KV_DTYPES[layout.kv_dtype])
    except ValueError as error:
        raise ConfigError(f"{error}; choose another --dtype or --kv-cache-dtype, or --device cpu") from None
    kernels = TritonKernels(config.sliding_window)
    _log.info("kernels.selected", name=kernels.name)
    return kernels
