"""The Triton kernels compiled, on the device: the checks that tests/engine runs interpreted, on larger batches.

Geometries come from a short list, because each is compiled (a second or two) the first time it is met.
"""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

if not torch.cuda.is_available():
    pytest.skip("there is no CUDA device", allow_module_level=True)

import triton_attention as attention
import triton_ops as ops
import triton_sample as sampling
from block_copies import CopyCase, check_copies, copy_cases
from triton_cases import BF16, E4M3, E5M2, FP16, FP32, Geometry, noise

from engine.kernels import reference
from engine.kernels.triton.kernels import TritonKernels

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(600)]

GEOMETRIES = st.sampled_from(
    [
        Geometry(3, 3, 64, 16, BF16, BF16),
        Geometry(2, 4, 128, 16, BF16, BF16),
        Geometry(1, 8, 128, 32, FP16, FP16),
        Geometry(2, 1, 80, 8, BF16, BF16),
        Geometry(4, 2, 96, 16, BF16, BF16),
        Geometry(1, 16, 256, 64, BF16, BF16),
        Geometry(2, 4, 128, 16, BF16, E4M3, 0.5, 1.7),
        Geometry(2, 5, 64, 16, FP16, E5M2, 1.7, 0.5),
        Geometry(1, 4, 256, 16, BF16, E4M3),
        Geometry(2, 3, 64, 16, FP32, FP32),
        Geometry(1, 4, 128, 16, FP32, BF16),
        Geometry(1, 4, 256, 16, FP32, FP32),
    ]
)

cases = settings(max_examples=200, deadline=None)


@cases
@given(attention.attention_cases(GEOMETRIES, max_new=400, max_past=1500, max_seqs=6))
def test_attention(case: attention.AttentionCase) -> None:
    attention.check_attention(case)


def test_a_sequence_decodes_alike_alone_and_in_company() -> None:
    attention.check_alike_alone_and_in_company()


@pytest.mark.parametrize("past", [10, 2000])
def test_padding_of_a_decode_batch_gives_zeros(past: int) -> None:
    attention.check_padding(past)


@pytest.mark.parametrize("kv_dtype", [E4M3, E5M2], ids=str)
def test_fp8(kv_dtype: torch.dtype) -> None:
    attention.check_fp8_codes(kv_dtype)
    ops.check_fp8_rounding(kv_dtype)


@cases
@given(ops.store_cases(GEOMETRIES, max_rows=100))
def test_rope_and_store(case: ops.StoreCase) -> None:
    ops.check_rope_and_store(case)


@cases
@given(ops.rows_cases)
def test_rms_norm_and_silu_mul(case: ops.RowsCase) -> None:
    ops.check_rms_norm(case)
    ops.check_silu_mul(case)


@pytest.mark.parametrize("dtype", [BF16, FP16, FP32], ids=str)
def test_logits_are_not_rounded(dtype: torch.dtype) -> None:
    x, weight = noise(5, 256, dtype=dtype), noise(1000, 256, dtype=dtype, scale=1 / 16)
    got = TritonKernels().logits(x, weight)
    assert got.dtype == FP32
    torch.testing.assert_close(got, reference.linear(x, weight), rtol=1e-4, atol=1e-4)


@cases
@given(ops.head_norm_cases(GEOMETRIES))
def test_head_norm(case: ops.HeadNormCase) -> None:
    ops.check_head_norm(case)


@cases
@given(sampling.sample_cases)
def test_sample(case: sampling.SampleCase) -> None:
    sampling.check_sample(case)


@cases
@given(copy_cases())
def test_gather_and_scatter(case: CopyCase) -> None:
    check_copies(TritonKernels(), case)
