"""Which number format a worker computes in, and why."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import torch

from core.errors import ConfigError

TORCH_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
"""The names of settings, checkpoints and KV layouts, and what torch calls them."""

KV_DTYPES = TORCH_DTYPES | {"fp8_e4m3": torch.float8_e4m3fn, "fp8_e5m2": torch.float8_e5m2}
"""The same for what a KV pool may hold."""

BF16_CPU_FLAGS = frozenset({"avx512_bf16", "amx_bf16"})


@cache
def cpu_flags() -> frozenset[str]:
    """Instruction set flags of this machine's CPU as /proc/cpuinfo names them; empty where it has none."""
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return frozenset()
    for line in text.splitlines():
        name, _, value = line.partition(":")
        if name.strip() in ("flags", "Features"):
            return frozenset(value.split())
    return frozenset()


def resolve_dtype(setting: str, device_type: str = "cpu") -> tuple[str, str]:
    """The compute dtype for `auto`, `fp32`, `bf16` or `fp16`, and the reason as a phrase for the log.

    `auto` is bf16 on CUDA and on CPUs with bf16 instructions, else fp32. Measured on one AVX512-BF16
    core, a [256, 576] x [576, 3072] product: fp32 94 GFLOP/s, bf16 214; on a core without them bf16
    is slower than fp32. Raises ConfigError for fp16 on a CPU: its range overflows in ordinary
    checkpoints, and no CPU path is faster for it.
    """
    if setting not in ("auto", *TORCH_DTYPES):
        raise ConfigError(f"dtype {setting!r} is not known; choose auto, {', '.join(TORCH_DTYPES)}")
    cuda = device_type == "cuda"
    if setting == "fp16" and not cuda:
        raise ConfigError("dtype fp16 is not supported on a CPU; use bf16 or fp32")
    if setting != "auto":
        return setting, "as set"
    if cuda:
        return "bf16", "auto: the GPU computes in bf16"
    native = sorted(BF16_CPU_FLAGS & cpu_flags())
    if native:
        return "bf16", f"auto: the CPU has bf16 instructions ({', '.join(native)})"
    return "fp32", "auto: the CPU has no bf16 instructions, so fp32 is faster"


def check_quantization(setting: str, device_type: str = "cpu") -> None:
    """Raises ConfigError for `int8` on a device that has no int8 kernels."""
    if setting != "none" and device_type != "cpu":
        raise ConfigError(
            f"--quantization {setting} is for CPU workers, this one runs on {device_type}; "
            "leave it out here (prefill and decode workers may choose differently)"
        )
