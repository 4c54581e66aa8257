"""Where a worker computes: the CPU, or one CUDA device."""

from __future__ import annotations

import torch

from core.errors import ConfigError


def resolve_device(setting: str) -> torch.device:
    """The device for `auto` (CUDA where there is one), `cpu` or `cuda` (the first that the process sees).

    Raises ConfigError for `cuda` where torch finds none.
    """
    if setting not in ("auto", "cpu", "cuda"):
        raise ConfigError(f"device {setting!r} is not known; choose auto, cpu or cuda")
    if setting == "cpu" or (setting == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    if not torch.cuda.is_available():
        build = "a build without CUDA" if torch.version.cuda is None else f"for CUDA {torch.version.cuda}"
        raise ConfigError(
            f"--device cuda: torch {torch.__version__} ({build}) finds no CUDA device; check nvidia-smi and "
            "CUDA_VISIBLE_DEVICES, or use --device cpu"
        )
    return torch.device("cuda", torch.cuda.current_device())


def rank_device(device: torch.device, rank: int, degree: int) -> torch.device:
    """Where tensor-parallel rank `rank` computes; `device`: what `resolve_device` gave. A GPU has one rank.

    Raises ConfigError when this process sees fewer GPUs than ranks.
    """
    if device.type == "cpu":
        return device
    visible = torch.cuda.device_count()
    if visible < degree:
        raise ConfigError(
            f"--tensor-parallel-size {degree} needs a GPU for each rank, this process sees {visible}; let "
            "CUDA_VISIBLE_DEVICES name as many, or lower it"
        )
    return torch.device("cuda", rank)
