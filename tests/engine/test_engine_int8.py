"""Int8 products: bit for bit what they are defined to be, each row on its own; and weights from the file."""

from __future__ import annotations

import ctypes
import functools
import random
import subprocess
import tempfile
from pathlib import Path

import numpy as np
import pytest
import torch
from tiny_llama import (
    TinyCheckpoint,
    dense_logits,
    layout_of,
    run_chunks,
    scattered_tables,
    tiny_config,
    tiny_runner,
)

from core.errors import ConfigError
from engine.batch import Chunk
from engine.kernels import int8, native_build
from engine.kernels.int8 import QuantizedWeight
from engine.kernels.interface import Kernels
from engine.kernels.native import NativeKernels
from engine.kv_cache import KVCache
from engine.models.dtype import check_quantization, cpu_flags
from engine.models.llama import Llama
from engine.models.parameter import Parameter
from engine.models.rope import rope_frequencies
from engine.models.storage import storage_of
from engine.models.weights import load_weights
from engine.runner import ModelRunner

pytest_plugins = ["kernel_sets"]

DTYPES = [torch.float32, torch.bfloat16]


def quantized(weight: torch.Tensor, dtype: torch.dtype = torch.float32) -> QuantizedWeight:
    """Packed into memory full of other bytes, in two pieces that share a panel."""
    shape = int8.packed_shape(tuple(weight.shape))
    packed = torch.full(shape, 77, dtype=torch.uint8)
    scales = torch.full((shape[0] * int8.PANEL,), float("nan"))
    half = weight.shape[0] // 2
    int8.pack(weight[:half], 0, packed, scales)
    int8.pack(weight[half:], half, packed, scales)
    return QuantizedWeight(packed, scales, (weight.shape[0], weight.shape[1]), dtype)


def twin(x: torch.Tensor, weight: torch.Tensor) -> np.ndarray:
    """The definition in numpy: round(number * (127 / max)), int64 sums of groups, then the scales in order."""

    def quantize(rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        highest = np.abs(rows).max(1)
        with np.errstate(divide="ignore", over="ignore"):
            inverse = np.where(highest > 1e-30, np.float32(127) / highest, np.float32(0))
        return np.rint(rows * inverse[:, None]).astype(np.int64), highest / np.float32(127)

    b, b_scales = quantize(weight.numpy())
    total = np.zeros((len(x), len(b)), np.float32)
    for at in range(0, x.shape[1], 64):
        a, a_scales = quantize(x[:, at : at + 64].float().numpy())
        total += (a @ b[:, at : at + 64].T).astype(np.float32) * a_scales[:, None]
    return total * b_scales


def random_rows(generator: random.Random, rows: int, width: int) -> torch.Tensor:
    """Rows of very different sizes, some with an outlier, some of zeros."""
    x = (
        torch.randn(rows, width)
        * torch.tensor([10.0 ** generator.uniform(-6, 6) for _ in range(rows)])[:, None]
    )
    for row in range(rows):
        if generator.random() < 0.3:
            x[row, generator.randrange(width)] *= 1000
        elif generator.random() < 0.1:
            x[row] = 0
    return x


# ---- products


@pytest.mark.parametrize("seed", range(30))
def test_products_equal_the_definition_bit_for_bit(kernels: Kernels, seed: int) -> None:
    generator = random.Random(seed)
    torch.manual_seed(seed)
    for dtype in DTYPES:
        for rows in (1, generator.randrange(2, 12), generator.randrange(12, 80)):
            width, out = 32 * generator.randrange(1, 50), generator.randrange(1, 150)
            x, weight = random_rows(generator, rows, width).to(dtype), random_rows(generator, out, width)
            want, matrix = torch.from_numpy(twin(x, weight)), quantized(weight)
            assert torch.equal(kernels.logits(x, matrix), want)
            assert torch.equal(kernels.linear(x, matrix), want.to(dtype))
            bias = torch.randn(out).to(dtype)
            assert torch.equal(kernels.linear(x, matrix, bias), want.to(dtype) + bias)


@pytest.mark.parametrize("dtype", DTYPES)
def test_sums_do_not_saturate(kernels: Kernels, dtype: torch.dtype) -> None:
    """Largest numbers of every sign: two products of 127 * 127 are beyond int16."""
    width = 4096
    x = torch.ones(3, width, dtype=dtype)
    x[1] = -1
    x[2, ::2] = -1
    weight = torch.ones(40, width)
    weight[1] = -1
    weight[2, ::2] = -1
    got = kernels.logits(x, quantized(weight))
    torch.testing.assert_close(got, x.float() @ weight.T, rtol=1e-6, atol=0)
    assert torch.equal(got, torch.from_numpy(twin(x, weight)))


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_is_the_same_bits_in_every_batch(kernels: Kernels, dtype: torch.dtype) -> None:
    torch.manual_seed(3)
    weight = quantized(torch.randn(200, 576) / 24)
    x = torch.randn(60, 576).to(dtype)
    alone = torch.cat([kernels.linear(row[None], weight) for row in x])
    for batch in [range(60), range(59, -1, -1), range(3, 16), [7], [7, 7, 8], range(0, 60, 5)]:
        at = torch.tensor(list(batch))
        neighbours = x[at]
        assert torch.equal(kernels.linear(neighbours, weight), alone[at])
    neighbours = x.clone()
    neighbours[1::2] *= 1e4
    neighbours[1, 5] = 1e30
    assert torch.equal(kernels.linear(neighbours, weight)[::2], alone[::2])


def test_threads_change_nothing(best_kernels: Kernels) -> None:
    torch.manual_seed(4)
    weight, x = quantized(torch.randn(1000, 576)), torch.randn(70, 576).bfloat16()
    threads = torch.get_num_threads()
    try:
        results = []
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            results += [best_kernels.logits(x, weight), best_kernels.logits(x[:5], weight).repeat(14, 1)]
    finally:
        torch.set_num_threads(threads)
    assert all(torch.equal(result[:5], results[0][:5]) for result in results)
    assert all(torch.equal(result, results[0]) for result in results[::2])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_what_is_not_finite_shows_in_its_row_and_nowhere_else(
    kernels: Kernels, bad: float, dtype: torch.dtype
) -> None:
    torch.manual_seed(5)
    weight, x = quantized(torch.randn(50, 96)), torch.randn(4, 96).to(dtype)
    want = kernels.linear(x, weight)
    x[2, 40] = bad
    got = kernels.linear(x, weight)
    assert not torch.isfinite(got[2].float()).any()
    assert torch.equal(got[[0, 1, 3]], want[[0, 1, 3]])


def test_zero_and_tiny_rows_give_zero(kernels: Kernels) -> None:
    x = torch.zeros(3, 64)
    x[1] = 1e-42
    x[2] = 1e-31
    weight = torch.randn(33, 64)
    weight[4] = 0
    assert not kernels.linear(x, quantized(weight)).any()
    assert not kernels.linear(torch.randn(2, 64), quantized(weight))[:, 4].any()


@pytest.mark.parametrize("dtype", DTYPES)
def test_embedding_rows(kernels: Kernels, dtype: torch.dtype) -> None:
    torch.manual_seed(6)
    table = torch.randn(97, 64)
    ids = torch.tensor([96, 0, 31, 32, 31])
    got = kernels.embed(ids, quantized(table, dtype))
    assert got.dtype == dtype
    torch.testing.assert_close(got.float(), table[ids], rtol=0, atol=float(table.abs().max()) / 127)


# ---- other CPUs: the same source with instructions taken away


@functools.cache
def compiled(*flags: str) -> ctypes.CDLL:
    source = native_build.SOURCES / "linear_int8.c"
    with tempfile.TemporaryDirectory() as folder:
        library = f"{folder}/int8.so"
        subprocess.run(
            ["cc", "-std=gnu17", "-O2", "-fPIC", "-shared", "-Wno-psabi", *flags, str(source), "-o", library],
            check=True, timeout=60, capture_output=True,
        )  # fmt: skip
        return ctypes.CDLL(library)


@pytest.mark.parametrize(
    ("flags", "needs"),
    [
        ((), ""),
        (("-mavx2", "-mfma"), "avx2"),
        (("-mavx512f", "-mavx512bw"), "avx512bw"),
    ],
    ids=["plain", "avx2", "avx512"],
)
def test_cpus_without_vnni_get_the_same_bits(
    best_kernels: Kernels, flags: tuple[str, ...], needs: str
) -> None:
    if not isinstance(best_kernels, NativeKernels) or (needs and needs not in cpu_flags()):
        pytest.skip(f"no C compiler or no {needs}")
    function = compiled(*flags).baton_linear_int8
    function.argtypes, function.restype = best_kernels._lib.baton_linear_int8.argtypes, None
    torch.manual_seed(7)
    for rows, width, out in [(1, 32, 5), (7, 576, 97), (3, 4096, 32)]:
        x, weight = torch.randn(rows, width), torch.randn(out, width)
        weight[0], x[0] = 1.0, -1.0
        matrix, got = quantized(weight), torch.empty(rows, out)
        scratch = torch.empty(2 * rows * width, dtype=torch.uint8)
        function(
            x.data_ptr(), matrix.packed.data_ptr(), matrix.scales.data_ptr(), got.data_ptr(),
            scratch.data_ptr(), rows, out, width, 0, 0,
        )  # fmt: skip
        assert torch.equal(got, best_kernels.logits(x, matrix))


# ---- weights


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_weights_come_back_from_the_file(dtype: str, tmp_path: Path) -> None:
    config = tiny_config()
    checkpoint = TinyCheckpoint(config)
    plain = load_weights(checkpoint, "fp32", tmp_path)
    for _ in range(2):
        weights = load_weights(checkpoint, dtype, tmp_path, quantization="int8")
        for name, tensor in plain.items():
            if tensor.dim() == 1:
                assert torch.equal(weights[name], tensor.to(weights[name].dtype))
                continue
            rows, scales = int8.quantize(tensor)
            got = weights[name]
            assert (got.shape, got.dtype) == (tuple(tensor.shape), weights["final_norm"].dtype)
            assert torch.equal(got.scales[: len(scales)], scales)
            assert torch.equal(int8._rows(got, torch.arange(len(rows))), rows)
    assert checkpoint.conversions == 2
    assert {file.name[33:] for file in tmp_path.glob("*.safetensors")} == {
        "fp32-v1.safetensors",
        f"{dtype}-int8-v1.safetensors",
    }


def test_int8_weights_take_a_quarter(tmp_path: Path) -> None:
    checkpoint = TinyCheckpoint(tiny_config(tie=False))
    plain, small = (load_weights(checkpoint, "fp32", tmp_path, quantization=q) for q in ("none", "int8"))
    assert sum(w.nbytes for w in small.values()) < 0.4 * sum(w.nbytes for w in plain.values())


def test_a_matrix_that_cannot_be_int8_is_refused() -> None:
    matrix = Parameter.single("layers.0.down", "d", 8, 66)
    with pytest.raises(
        ConfigError, match=r"layers.0.down .* 66 is no multiple of 4; use --quantization none"
    ):
        storage_of(matrix, "bf16", "int8")
    assert storage_of(matrix, "bf16", "none").layout()[0].shape == (8, 66)


def test_a_gpu_worker_refuses() -> None:
    check_quantization("int8")
    check_quantization("none", "cuda")
    with pytest.raises(ConfigError, match="for CPU workers"):
        check_quantization("int8", "cuda")


# ---- the model


@pytest.mark.parametrize("tie", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_logits_are_near_fp32(kernels: Kernels, dtype: str, tie: bool, tmp_path: Path) -> None:
    config = tiny_config(tie=tie)
    checkpoint = TinyCheckpoint(config)
    weights = load_weights(checkpoint, dtype, tmp_path, quantization="int8")
    runner = ModelRunner(Llama(config, weights, kernels), KVCache(layout_of(config, kv_dtype=dtype), 8))
    ids = [(5 * i + 3) % config.vocab_size for i in range(50)]
    want = dense_logits(checkpoint, ids, rope_frequencies(config))
    parts = [run_chunks(runner, Chunk(ids[at : at + 20], at, [5, 2, 1, 7], 0)) for at in range(0, 50, 20)]
    # Random weights answer to every rounding; a trained model loses 1% of perplexity.
    assert (torch.cat(parts) - want).norm() / want.norm() < 0.2


def test_a_decode_is_the_same_bits_alone_and_among_others(kernels: Kernels, tmp_path: Path) -> None:
    config = tiny_config()
    weights = load_weights(TinyCheckpoint(config), "fp32", tmp_path, quantization="int8")
    runner = tiny_runner(kernels, tmp_path)
    runner.model = Llama(config, weights, kernels)
    prompts = [[(7 * i + n) % 97 for i in range(n)] for n in (40, 17, 5)]
    tables = scattered_tables([len(p) + 1 for p in prompts], 16, runner.cache.num_blocks)
    for prompt, table in zip(prompts, tables, strict=True):
        run_chunks(runner, Chunk(prompt, 0, table))
    steps = [Chunk([i], len(p), t, 0) for i, (p, t) in enumerate(zip(prompts, tables, strict=True))]
    alone = torch.cat([run_chunks(runner, step) for step in steps])
    assert torch.equal(run_chunks(runner, *steps), alone)
