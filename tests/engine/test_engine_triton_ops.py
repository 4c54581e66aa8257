"""Triton kernels around attention, interpreted, against the torch twins."""

from __future__ import annotations

import interpreted_triton  # noqa: F401  (before every import of the kernels)
import pytest
import torch
import triton_checks as checks
from hypothesis import given, settings
from triton_cases import E4M3, E5M2, as_stored

from engine.kernels.triton.block_copy import gather_blocks
from engine.kernels.triton.norm import rms_norm
from engine.kernels.triton.rope import rope_and_store

# Numpy warns where hardware silently goes to infinity, in lanes that a mask drops.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

cases = settings(max_examples=200, deadline=None)


@cases
@given(checks.rows_cases)
def test_rms_norm(case: checks.RowsCase) -> None:
    checks.check_rms_norm(case)


@cases
@given(checks.rows_cases)
def test_silu_mul(case: checks.RowsCase) -> None:
    checks.check_silu_mul(case)


@cases
@given(checks.store_cases)
def test_rope_and_store(case: checks.StoreCase) -> None:
    checks.check_rope_and_store(case)


@cases
@given(checks.copy_cases())
def test_gather_and_scatter(case: checks.CopyCase) -> None:
    checks.check_copies(case)


@pytest.mark.parametrize("kv_dtype", [E4M3, E5M2], ids=str)
def test_fp8_rounds_like_torch(kv_dtype: torch.dtype) -> None:
    """Every number of the format, the ties between neighbours, what lies beyond the largest, and NaN."""
    codes = torch.arange(256, dtype=torch.uint8).view(kv_dtype).float()
    exact = codes[codes.isfinite()].unique()
    ties = (exact[1:] + exact[:-1]) / 2
    edges = torch.tensor([float("inf"), -1e9, 1e-30, -0.0, float("nan")])
    nudged = torch.cat((torch.nextafter(ties, exact[1:]), torch.nextafter(ties, exact[:-1])))
    values = torch.cat((exact, ties, nudged, edges, torch.randn(16)))
    values = torch.nn.functional.pad(values, (0, -len(values) % 64)).view(-1, 64)
    # v is stored as it stands in qkv: no angle meets it.
    qkv = torch.cat((values, values, values), 1)
    pool = torch.zeros(len(values) // 8 + 1, 1, 2, 8, 64).to(kv_dtype)
    rows = torch.arange(len(values))
    rope_and_store(qkv, torch.ones(1, 2, 32), torch.zeros_like(rows), rows, pool)
    got = pool[:, 0, 1].reshape(-1, 64)[: len(values)].float()
    want = as_stored(values, kv_dtype, 1.0).float()
    assert torch.equal(got.nan_to_num(7e7), want.nan_to_num(7e7))


def test_what_does_not_fit_is_refused() -> None:
    pool = torch.zeros(4, 1, 2, 2, 8, 64)
    ids = torch.tensor([0])
    with pytest.raises(ValueError, match=r"must be contiguous \(1, 1, 2, 2, 8, 64\)"):
        gather_blocks(pool, ids, torch.zeros(2, 1, 2, 2, 8, 64))
    with pytest.raises(ValueError, match="no run of the pool's 2 KV heads"):
        gather_blocks(pool, ids, torch.zeros(1, 1, 2, 2, 8, 64), range(1, 3))
    with pytest.raises(ValueError, match="contiguous"):
        rms_norm(torch.zeros(4, 4).T, torch.zeros(4), 1e-5)
