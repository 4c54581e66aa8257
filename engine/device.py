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
