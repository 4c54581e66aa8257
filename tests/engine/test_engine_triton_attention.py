"""Triton attention, interpreted, against the torch twin on random batches over a pool full of NaN."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import interpreted_triton  # noqa: F401  (before every import of the kernels)
import pytest
import torch
import triton_attention as attention
from hypothesis import given, settings
from tiny_llama import run_chunks, scattered_tables, tiny_runner
from triton_cases import E4M3, E5M2, geometries

from engine.batch import Chunk
from engine.kernels.torch_kernels import TorchKernels
from engine.kernels.triton import decode
from engine.kernels.triton.kernels import TritonKernels
from engine.kernels.triton.tuning import prefill_tile

# Numpy warns where hardware silently goes to infinity, in lanes that a mask drops.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")


@settings(max_examples=200, deadline=None)
@given(attention.attention_cases(geometries(), max_new=9, max_past=50))
def test_attention(case: attention.AttentionCase) -> None:
    attention.check_attention(case)


@pytest.mark.slow
@pytest.mark.timeout(900)
@settings(max_examples=150, deadline=None)
@given(attention.attention_cases(geometries(), max_new=40, max_past=300, max_seqs=5))
def test_attention_of_larger_batches(case: attention.AttentionCase) -> None:
    attention.check_attention(case)


@pytest.mark.parametrize("window", [0, 7, 200])
@pytest.mark.parametrize("q_scale", [1e-3, 40.0])
def test_softmax_survives_large_scores(window: int, q_scale: float) -> None:
    case = attention.AttentionCase(attention.GEOMETRY, ((1, 250), (5, 120)), window, q_scale, 7)
    attention.check_attention(case)
    fp8 = replace(attention.GEOMETRY, kv_dtype=E4M3, k_scale=0.5)
    attention.check_attention(replace(case, geometry=fp8))


def test_a_sequence_decodes_alike_alone_and_in_company() -> None:
    attention.check_alike_alone_and_in_company()


@pytest.mark.parametrize("past", [10, 100])
def test_padding_of_a_decode_batch_gives_zeros(past: int) -> None:
    attention.check_padding(past)


@pytest.mark.parametrize("kv_dtype", [E4M3, E5M2], ids=str)
def test_every_fp8_code_is_read_exactly(kv_dtype: torch.dtype) -> None:
    attention.check_fp8_codes(kv_dtype)


def test_splits_are_constant_until_they_would_be_too_many() -> None:
    smallest = decode.split_tokens_for(1)
    assert decode.split_tokens_for(smallest * decode.MAX_SPLITS) == smallest
    assert decode.split_tokens_for(smallest * decode.MAX_SPLITS + 1) == 2 * smallest
    assert decode.split_tokens_for(smallest * decode.MAX_SPLITS * 5) == 8 * smallest


@pytest.mark.parametrize(("head_dim", "dtype"), [(512, torch.bfloat16), (256, torch.float32)])
def test_shapes_without_a_tile_are_refused(head_dim: int, dtype: torch.dtype) -> None:
    with pytest.raises(ValueError, match=f"head_dim {head_dim} in {dtype}"):
        prefill_tile(head_dim, dtype, torch.bfloat16)


def test_a_whole_model_agrees_with_the_torch_set(tmp_path: Path) -> None:
    """Prompts, a chunk over history and decodes through every layer of a tiny Llama, in fp32."""
    got, want = (tiny_runner(kernels, tmp_path) for kernels in (TritonKernels(), TorchKernels()))
    a, b = scattered_tables([40, 21], 16, 128)
    steps = [
        [Chunk(range(20), 0, a, 0), Chunk(range(5), 0, b, 0)],
        [Chunk(range(15), 20, a, 14), Chunk([3], 5, b, 0)],
        [Chunk([7], 35, a, 0), Chunk([9], 6, b, 0)],
    ]
    for step in steps:
        torch.testing.assert_close(run_chunks(got, *step), run_chunks(want, *step), rtol=1e-4, atol=1e-4)
