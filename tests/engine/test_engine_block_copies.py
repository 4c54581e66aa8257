"""Copies between pool and buffer, by the CPU kernel set (the native one shares them) against the twins."""

from __future__ import annotations

from block_copies import CopyCase, check_copies, check_refusals, copy_cases
from hypothesis import given, settings

from engine.kernels.native import NativeKernels
from engine.kernels.torch_kernels import TorchKernels


@settings(max_examples=200, deadline=None)
@given(copy_cases())
def test_gather_and_scatter(case: CopyCase) -> None:
    check_copies(TorchKernels(), case)


def test_what_does_not_fit_is_refused() -> None:
    check_refusals(TorchKernels())


def test_the_native_set_adds_nothing_to_a_copy() -> None:
    assert NativeKernels.gather_blocks is TorchKernels.gather_blocks
    assert NativeKernels.scatter_blocks is TorchKernels.scatter_blocks
