"""Fixtures: the CPU kernel sets, each compiled at most once a session."""

from __future__ import annotations

import functools
import tempfile

import pytest

from engine.kernels.interface import Kernels
from engine.kernels.native import NativeKernels
from engine.kernels.native_build import BuildFailed
from engine.kernels.torch_kernels import TorchKernels


@functools.cache
def native_kernels() -> NativeKernels | None:
    """None where there is no C compiler."""
    with tempfile.TemporaryDirectory() as folder:
        try:
            return NativeKernels(folder)
        except BuildFailed:
            return None


@pytest.fixture(params=["torch", "native"])
def kernels(request: pytest.FixtureRequest) -> Kernels:
    """Each kernel set in turn."""
    if request.param == "torch":
        return TorchKernels()
    return native_kernels() or pytest.skip("no C compiler")


@pytest.fixture
def best_kernels() -> Kernels:
    """What a worker on this machine would choose."""
    return native_kernels() or TorchKernels()
