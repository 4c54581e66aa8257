"""What a worker's settings may not be together, said before its weights are loaded."""

from __future__ import annotations

import torch

from core.errors import ConfigError
from core.kv import KVLayout
from core.settings import Settings
from engine.models.dtype import check_quantization
from kvtransfer.tier_stack import parse_order


def check_settings(settings: Settings, layout: KVLayout, device: torch.device) -> None:
    """Raises ConfigError for what this device has no kernels or no way for, for tiers that could not work,
    and for what ranks cannot do. `layout`: the whole model's.
    """
    check_combination(settings, device)
    if device.type == "cuda":
        _check_gpu_layout(layout)


def check_combination(settings: Settings, device: torch.device) -> None:
    """Of `check_settings`, what shows without a model."""
    check_quantization(settings.quantization, device.type)
    _check_tiers(settings)
    if device.type == "cuda":
        _check_gpu(settings)
    if settings.tensor_parallel_size > 1:
        _check_ranks(settings, device)


def _has_tiers(settings: Settings) -> bool:
    return bool(settings.host_cache_bytes or settings.disk_cache_dir or settings.redis_url)


def _check_tiers(settings: Settings) -> None:
    order = parse_order(settings.tier_order)
    if _has_tiers(settings) and not settings.enable_prefix_caching:
        raise ConfigError("tiers keep blocks by their prefix: set enable_prefix_caching, or no tiers")
    wanted = {"host": settings.host_cache_bytes, "disk": settings.disk_cache_dir, "redis": settings.redis_url}
    for name, setting in wanted.items():
        if setting and name not in order:
            raise ConfigError(f"--tier-order {settings.tier_order} leaves out {name}; add it or unset it")


def _check_gpu(settings: Settings) -> None:
    if settings.transport == "shm":
        raise ConfigError(
            "--transport shm moves blocks in host memory, this worker's are on a GPU; use --transport nixl"
        )


def _check_gpu_layout(layout: KVLayout) -> None:
    if layout.kv_dtype in ("int8", "k8v4"):
        raise ConfigError(
            f"--kv-cache-dtype {layout.kv_dtype} is for CPU workers, this one runs on a GPU; use auto, "
            "fp8_e4m3 or fp8_e5m2, the same on all workers that exchange blocks"
        )
    if layout.skip_layers:
        raise ConfigError(
            "--kv-quant-skip-layers is for CPU workers, this one runs on a GPU; leave it out, on all "
            "workers that exchange blocks"
        )


def _check_ranks(settings: Settings, device: torch.device) -> None:
    on_gpu = device.type == "cuda"
    cannot = (
        # Rank 0 maps the others' pools: NIXL cannot offer what is mapped, and blocks lie on several GPUs.
        (on_gpu and settings.transport != "collective", "NIXL on GPUs", "--transport collective"),
        (
            on_gpu and _has_tiers(settings),
            "tiers on GPUs",
            "no --host-cache-bytes, --disk-cache-dir, --redis-url",
        ),
        # Gloo adds the parts of a tensor in an order that follows from its size.
        (settings.deterministic, "the same sums in every batch", "no --deterministic"),
    )
    for is_wanted, thing, remedy in cannot:
        if is_wanted:
            raise ConfigError(
                f"--tensor-parallel-size {settings.tensor_parallel_size} does not go with {thing}; "
                f"use {remedy}, or --tensor-parallel-size 1"
            )
