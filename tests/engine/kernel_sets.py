"""Fixtures: the CPU kernel sets, each compiled at most once a session."""

from __future__ import annotations

import functools
import tempfile
from collections.abc import Callable

import pytest

from engine.kernels.interface import Kernels
from engine.kernels.native import NativeKernels
from engine.kernels.native_build import BuildFailed
from engine.kernels.torch_kernels import TorchKernels

_FOLDER = tempfile.TemporaryDirectory()


@functools.cache
def native_kernels(sliding_window: int = 0) -> NativeKernels | None:
    """None where there is no C compiler."""
    try:
        return NativeKernels(_FOLDER.name, sliding_window)
    except BuildFailed:
        return None


@pytest.fixture(params=["torch", "native"])
def kernels_for(request: pytest.FixtureRequest) -> Callable[[int], Kernels]:
    """Each kernel set in turn, made for a sliding window in tokens (0: none)."""

    def make(sliding_window: int) -> Kernels:
        if request.param == "torch":
            return TorchKernels(sliding_window)
        return native_kernels(sliding_window) or pytest.skip("no C compiler")

    return make


@pytest.fixture
def kernels(kernels_for: Callable[[int], Kernels]) -> Kernels:
    """Each kernel set in turn."""
    return kernels_for(0)


@pytest.fixture
def best_kernels() -> Kernels:
    """What a worker on this machine would choose."""
    return native_kernels() or TorchKernels()
