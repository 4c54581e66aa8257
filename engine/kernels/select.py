"""Chooses the kernel set for this machine."""

from __future__ import annotations

import os

from checkpoint.config import ModelConfig
from core import log
from core.kv import KVLayout
from engine.kernels.interface import Kernels
from engine.kernels.native import NativeKernels, unsupported
from engine.kernels.native_build import BuildFailed
from engine.kernels.torch_kernels import TorchKernels

_log = log.get("kernels")


def select_kernels(config: ModelConfig, layout: KVLayout, cache_dir: str | os.PathLike[str]) -> Kernels:
    """The native set where it can be built and fits the model, else plain torch; says which, and why."""
    reason = unsupported(config, layout)
    if not reason:
        try:
            kernels = NativeKernels(cache_dir)
        except (BuildFailed, OSError) as error:
            reason = str(error)
        else:
            _log.info("kernels.selected", name=kernels.name)
            return kernels
    _log.warning("kernels.selected", name=TorchKernels.name, reason=f"decoding is slower: {reason}")
    return TorchKernels()
