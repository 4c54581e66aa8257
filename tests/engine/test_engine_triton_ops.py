"""Triton kernels around attention, interpreted, against the torch twins."""

from __future__ import annotations

import interpreted_triton  # noqa: F401  (before every import of the kernels)
import pytest
import torch
import triton_ops as ops
from block_copies import CopyCase, check_copies, check_refusals, copy_cases
from hypothesis import given, settings
from triton_cases import E4M3, E5M2, geometries

from engine.kernels.triton.kernels import TritonKernels
from engine.kernels.triton.norm import rms_norm

# Numpy warns where hardware silently goes to infinity, in lanes that a mask drops.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

cases = settings(max_examples=200, deadline=None)


@cases
@given(ops.rows_cases)
def test_rms_norm(case: ops.RowsCase) -> None:
    ops.check_rms_norm(case)


@cases
@given(ops.rows_cases)
def test_silu_mul(case: ops.RowsCase) -> None:
    ops.check_silu_mul(case)


@cases
@given(ops.store_cases(geometries(), max_rows=3))
def test_rope_and_store(case: ops.StoreCase) -> None:
    ops.check_rope_and_store(case)


@cases
@given(ops.head_norm_cases(geometries()))
def test_head_norm(case: ops.HeadNormCase) -> None:
    ops.check_head_norm(case)


@cases
@given(copy_cases())
def test_gather_and_scatter(case: CopyCase) -> None:
    check_copies(TritonKernels(), case)


@pytest.mark.parametrize("kv_dtype", [E4M3, E5M2], ids=str)
def test_fp8_rounds_like_torch(kv_dtype: torch.dtype) -> None:
    ops.check_fp8_rounding(kv_dtype)


def test_what_does_not_fit_is_refused() -> None:
    check_refusals(TritonKernels())
    with pytest.raises(ValueError, match="contiguous"):
        rms_norm(torch.zeros(4, 4).T, torch.zeros(4), 1e-5)
