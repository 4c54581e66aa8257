"""What a worker's settings may not be together."""

import pytest
import torch

from core.errors import ConfigError
from core.kv import KVLayout
from core.settings import Settings
from services.worker.check import check_settings

LAYOUT = KVLayout(num_layers=2, num_kv_heads=1, head_dim=8, block_size=16, kv_dtype="fp32")


@pytest.mark.parametrize(
    ("name", "order", "setting"),
    [
        ("host", "disk", {"host_cache_bytes": 2**20, "disk_cache_dir": "/cache"}),
        ("disk", "host,redis", {"disk_cache_dir": "/cache"}),
        ("redis", "host,disk", {"redis_url": "redis://here"}),
    ],
)
def test_a_tier_that_the_order_leaves_out_is_refused(
    name: str, order: str, setting: dict[str, object]
) -> None:
    settings = Settings(**{"tier_order": order, **setting})  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=f"--tier-order {order} leaves out {name}; add it or unset it"):
        check_settings(settings, LAYOUT, torch.device("cpu"))
    check_settings(Settings(**{"tier_order": order}), LAYOUT, torch.device("cpu"))  # type: ignore[arg-type]


GPU = torch.device("cuda", 0)
HOST = {"host_cache_bytes": 2**20}
SPLIT = {"tensor_parallel_size": 2}


@pytest.mark.parametrize(
    ("device", "setting"),
    [
        ("cpu", HOST),
        ("cpu", SPLIT | HOST | {"disk_cache_dir": "/cache", "redis_url": "redis://here"}),
        ("cuda", HOST | {"disk_cache_dir": "/cache", "redis_url": "redis://here"}),
        ("cuda", SPLIT | {"transport": "collective"}),
    ],
)
def test_what_goes_together(device: str, setting: dict[str, object]) -> None:
    check_settings(Settings.model_validate(setting), LAYOUT, torch.device(device))


@pytest.mark.parametrize(
    ("setting", "said"),
    [
        ({}, "--tensor-parallel-size 2 does not go with NIXL on GPUs; use --transport collective, or"),
        ({"transport": "collective"} | HOST, "does not go with tiers on GPUs; use no --host-cache-bytes,"),
        ({"transport": "collective", "deterministic": True}, "does not go with the same sums in every batch"),
    ],
)
def test_what_ranks_on_gpus_cannot_do(setting: dict[str, object], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        check_settings(Settings.model_validate(SPLIT | setting), LAYOUT, GPU)
