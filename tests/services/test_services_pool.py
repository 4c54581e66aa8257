"""The pool of a worker: its size by share of the free RAM, what a CPU or GPU worker cannot be given."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from core.errors import ConfigError
from core.kv import KVLayout
from core.settings import Settings
from engine.device import resolve_device
from services.worker import pool
from services.worker.check import check_settings
from services.worker.transports import transports

LAYOUT = KVLayout(2, 1, 64, 16, "fp32")
CPU = torch.device("cpu")


def settings(**values: Any) -> Settings:
    return Settings.model_validate(values)


@pytest.mark.parametrize(
    ("values", "num_blocks"),
    [
        ({}, 2**30 // LAYOUT.block_nbytes),
        ({"gpu_memory_utilization": 0.5}, 400),
        ({"gpu_memory_utilization": 0.5, "workers_per_gpu": 2}, 400),
    ],
)
def test_blocks_on_a_cpu(values: dict[str, Any], num_blocks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool, "available_nbytes", lambda: 1000 * LAYOUT.block_nbytes)
    assert pool._fitting_blocks(settings(**values), LAYOUT, CPU, 100 * LAYOUT.block_nbytes) == num_blocks


@pytest.mark.parametrize(
    ("kv_dtype", "skipped", "says"),
    [
        ("int8", (), "--kv-cache-dtype int8 is for CPU workers"),
        ("k8v4", (), "--kv-cache-dtype k8v4 is for CPU workers"),
        ("fp8_e4m3", (1,), "--kv-quant-skip-layers is for CPU workers"),
        ("fp8_e5m2", (), ""),
    ],
)
def test_kv_formats_a_gpu_has_no_kernels_for(kv_dtype: str, skipped: tuple[int, ...], says: str) -> None:
    layout = KVLayout(2, 1, 64, 16, kv_dtype, skipped)
    check_settings(settings(), layout, CPU)
    if not says:
        return check_settings(settings(), layout, torch.device("cuda"))
    with pytest.raises(ConfigError, match=says):
        check_settings(settings(), layout, torch.device("cuda"))


@pytest.mark.parametrize(
    "tier", [{"host_cache_bytes": 1}, {"disk_cache_dir": "x"}, {"redis_url": "redis://x"}]
)
def test_there_are_no_tiers_below_several_gpus(tier: dict[str, Any]) -> None:
    check_settings(settings(**tier), LAYOUT, CPU)
    check_settings(settings(**tier), LAYOUT, torch.device("cuda"))
    several = settings(**tier, tensor_parallel_size=3, transport="collective")
    with pytest.raises(ConfigError, match="--host-cache-bytes"):
        check_settings(several, LAYOUT, torch.device("cuda"))


def test_blocks_on_a_gpu_do_not_move_over_shm() -> None:
    with pytest.raises(ConfigError, match="use --transport nixl"):
        check_settings(settings(transport="shm"), LAYOUT, torch.device("cuda"))
    assert list(transports(settings(), "w", "cuda")) == ["nixl"]
    assert list(transports(settings(), "w", "cpu")) == ["shm"]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_auto_is_the_cpu_and_cuda_is_refused() -> None:
    assert resolve_device("auto") == resolve_device("cpu") == CPU
    with pytest.raises(ConfigError, match="finds no CUDA device"):
        resolve_device("cuda")
    with pytest.raises(ConfigError, match="choose auto, cpu or cuda"):
        resolve_device("tpu")
