"""Triton attention, interpreted, against the torch twin on random batches over a pool full of NaN."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import interpreted_triton  # noqa: F401  (before every import of the kernels)
import pytest
import torch
import triton_cases as cases
from hypothesis import given, settings
from tiny_llama import run_chunks, scattered_tables, tiny_runner

from engine.batch import Chunk
from engine.kernels.triton import decode
from engine.kernels.triton.kernels import TritonKernels
from engine.kernels.triton.tuning import prefill_tile

# Numpy warns where hardware silently goes to infinity, in lanes that a mask drops.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")


@settings(max_examples=200, deadline=None)
@given(cases.attention_cases(max_new=9, max_past=50))
def test_attention(case: cases.AttentionCase) -> None:
    """Each case holds at least one decode and one chunk, so both kernels see it."""
    cases.check_attention(case)


@pytest.mark.slow
@settings(max_examples=600, deadline=None)
@given(cases.attention_cases(max_new=40, max_past=300, max_seqs=5))
def test_attention_of_larger_batches(case: cases.AttentionCase) -> None:
    cases.check_attention(case)


GEOMETRY = cases.Geometry(2, 3, 64, 16, cases.FP32, cases.FP32)


def decode_rows(case: cases.AttentionCase) -> tuple[torch.Tensor, ...]:
    """qkv, one layer of the pool, kv_lens and block tables of a batch of decodes."""
    torch.manual_seed(case.seed)
    batch, pool = cases.history(case)
    qkv = cases.noise(batch.num_tokens, case.geometry.qkv_width)
    return qkv, pool[:, cases.LAYER], batch.kv_lens, batch.block_tables


def decode_of(
    qkv: torch.Tensor, pool: torch.Tensor, lens: torch.Tensor, tables: torch.Tensor
) -> torch.Tensor:
    out = torch.full((len(lens), GEOMETRY.num_heads * GEOMETRY.head_dim), float("nan"))
    decode.decode_attention(qkv, pool, out, len(lens), lens, tables)
    return out


def test_a_sequence_decodes_alike_alone_and_in_company() -> None:
    """Bit for bit: at 30 tokens one split serves it alone, six are launched beside the long one."""
    chunks = tuple((1, past) for past in (29, 180, 63, 64, 0))
    qkv, pool, lens, tables = decode_rows(cases.AttentionCase(GEOMETRY, chunks, 0, 1.0, 5))
    together = decode_of(qkv, pool, lens, tables)
    for i, length in enumerate(lens.tolist()):
        width = -(-length // GEOMETRY.block_size)
        alone = decode_of(qkv[i : i + 1], pool, lens[i : i + 1], tables[i : i + 1, :width].contiguous())
        assert torch.equal(alone[0], together[i])


@pytest.mark.parametrize("past", [10, 100])
def test_padding_of_a_decode_batch_gives_zeros(past: int) -> None:
    """A row without tokens, its table pointing at poison, beside a real one; split and not."""
    case = cases.AttentionCase(GEOMETRY, ((1, past), (1, 0)), 0, 1.0, 6)
    qkv, pool, lens, tables = decode_rows(case)
    want = decode_of(qkv, pool, lens, tables)
    lens[1], tables[1] = 0, pool.shape[0] - 1
    got = decode_of(qkv, pool, lens, tables)
    assert torch.equal(got[0], want[0])
    assert not got[1].any()


@pytest.mark.parametrize("window", [0, 7, 200])
@pytest.mark.parametrize("q_scale", [1e-3, 40.0])
def test_softmax_survives_large_scores(window: int, q_scale: float) -> None:
    case = cases.AttentionCase(GEOMETRY, ((1, 250), (5, 120)), window, q_scale, 7)
    cases.check_attention(case)
    cases.check_attention(replace(case, geometry=replace(GEOMETRY, kv_dtype=cases.E4M3, k_scale=0.5)))


@pytest.mark.parametrize("kv_dtype", [cases.E4M3, cases.E5M2], ids=str)
def test_every_fp8_code_is_read_exactly(kv_dtype: torch.dtype) -> None:
    """A token that sees itself alone gives back its V, times the scale."""
    codes = torch.arange(256, dtype=torch.uint8)
    codes[~codes.view(kv_dtype).float().isfinite()] = 0
    pool = torch.zeros(1, 1, 2, 8, 256, dtype=torch.uint8)
    pool[0, 0, 1, 0] = codes
    out = torch.empty(1, 256)
    lens, tables = torch.ones(1, dtype=torch.int32), torch.zeros(1, 1, dtype=torch.int32)
    decode.decode_attention(torch.randn(1, 768), pool.view(kv_dtype), out, 1, lens, tables, v_scale=0.5)
    assert torch.equal(out[0], codes.view(kv_dtype).float() * 0.5)


def test_splits_are_constant_until_they_would_be_too_many() -> None:
    smallest = decode.split_tokens_for(1)
    assert decode.split_tokens_for(smallest * decode.MAX_SPLITS) == smallest
    assert decode.split_tokens_for(smallest * decode.MAX_SPLITS + 1) == 2 * smallest
    assert decode.split_tokens_for(smallest * decode.MAX_SPLITS * 5) == 8 * smallest


def test_a_head_dim_without_a_tile_is_refused() -> None:
    with pytest.raises(ValueError, match="head_dim 512; the largest is 256"):
        prefill_tile(512, torch.bfloat16, torch.bfloat16)


def test_a_whole_model_agrees_with_the_torch_set(tmp_path: Path) -> None:
    """Prompts, a chunk over history and decodes through every layer of a tiny Llama, in fp32."""
    from engine.kernels.torch_kernels import TorchKernels

    got, want = (tiny_runner(kernels, tmp_path) for kernels in (TritonKernels(), TorchKernels()))
    a, b = scattered_tables([40, 21], 16, 128)
    steps = [
        [Chunk(range(20), 0, a, 0), Chunk(range(5), 0, b, 0)],
        [Chunk(range(15), 20, a, 14), Chunk([3], 5, b, 0)],
        [Chunk([7], 35, a, 0), Chunk([9], 6, b, 0)],
    ]
    for step in steps:
        torch.testing.assert_close(run_chunks(got, *step), run_chunks(want, *step), rtol=1e-4, atol=1e-4)
