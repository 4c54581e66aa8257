"""Every CPU kernel set against the torch twins, on random shapes and a poisoned pool."""

from __future__ import annotations

import math
import random

import pytest
import torch
from tiny_llama import layout_of, scattered_tables, tiny_config

from core.errors import ConfigError
from core.kv import KVLayout
from engine.batch import Batch, Chunk
from engine.kernels import native, native_build, reference, select
from engine.kernels.interface import Kernels
from engine.kv_cache import KVCache
from engine.models.dtype import resolve_dtype

pytest_plugins = ["kernel_sets"]

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 2e-2}
GEOMETRIES = [(4, 4, 32), (6, 2, 64), (8, 1, 64), (10, 2, 32), (4, 2, 128)]
"""(heads, kv heads, head_dim): no sharing, groups of 3, 8 (two passes) and 5 (a pass and a bit)."""


def close(got: torch.Tensor, want: torch.Tensor, dtype: torch.dtype) -> None:
    tolerance = TOLERANCE[dtype]
    torch.testing.assert_close(got.float(), want.float(), rtol=tolerance, atol=tolerance)


@pytest.fixture(params=DTYPES)
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    torch.manual_seed(1)
    return DTYPES[request.param]


@pytest.mark.parametrize("rows", [1, 2, 3, 4, 5, 8, 13, 32, 70, 300])
@pytest.mark.parametrize(("width", "out"), [(32, 1), (64, 7), (96, 50), (576, 129)])
def test_linear(kernels: Kernels, dtype: torch.dtype, rows: int, width: int, out: int) -> None:
    x, weight = torch.randn(rows, width).to(dtype), (torch.randn(out, width) / math.sqrt(width)).to(dtype)
    want = reference.linear(x, weight)
    close(kernels.linear(x, weight), want, dtype)
    bias = torch.randn(out).to(dtype)
    close(kernels.linear(x, weight, bias), reference.linear(x, weight, bias), dtype)
    logits = kernels.logits(x, weight)
    assert logits.dtype == torch.float32
    close(logits, want, dtype)


def test_logits_are_not_rounded_to_bf16(kernels: Kernels) -> None:
    x, weight = torch.randn(2, 64).bfloat16(), torch.randn(5000, 64).bfloat16()
    torch.testing.assert_close(kernels.logits(x, weight), reference.linear(x, weight), rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("rows", [1, 33])
def test_norms_and_activation(kernels: Kernels, dtype: torch.dtype, rows: int) -> None:
    x, delta, weight = (
        torch.randn(rows, 96).to(dtype) * 3,
        torch.randn(rows, 96).to(dtype),
        torch.randn(96).to(dtype),
    )
    close(kernels.rms_norm(x, weight, 1e-5), reference.rms_norm(x, weight, 1e-5), dtype)
    residual = x.clone()
    got = kernels.add_rms_norm(delta, residual, weight, 1e-5)
    close(residual, x + delta, dtype)
    close(got, reference.rms_norm(x + delta, weight, 1e-5), dtype)
    gate_up = torch.cat((torch.linspace(-100, 100, rows * 96).view(rows, 96), torch.randn(rows, 96)), 1).to(
        dtype
    )
    close(kernels.silu_mul(gate_up), reference.silu_mul(gate_up), dtype)


CHUNKS = {
    "decodes": [(1, 0), (1, 1), (1, 6), (1, 7), (1, 8), (1, 15), (1, 16), (1, 17), (1, 63), (1, 130)],
    "mixed": [(9, 0), (1, 40), (12, 32), (1, 0), (16, 16), (5, 3), (33, 0), (1, 31), (24, 7), (2, 30)],
}
"""(new tokens, tokens before them) of each sequence."""


@pytest.mark.parametrize("shape", CHUNKS)
@pytest.mark.parametrize("block_size", [8, 16, 32])
@pytest.mark.parametrize("geometry", GEOMETRIES, ids=str)
@pytest.mark.parametrize("kv_dtype", ["fp32", "bf16"])
def test_rope_store_and_attention(
    kernels: Kernels,
    dtype: torch.dtype,
    shape: str,
    block_size: int,
    geometry: tuple[int, int, int],
    kv_dtype: str,
) -> None:
    num_heads, num_kv_heads, head_dim = geometry
    cache, twin = (KVCache(KVLayout(2, num_kv_heads, head_dim, block_size, kv_dtype), 64) for _ in range(2))
    batch = history(cache, CHUNKS[shape])
    twin.pool.copy_(cache.pool)
    rope = torch.randn(256, 2, head_dim // 2)
    qkv = torch.randn(batch.num_tokens, (num_heads + 2 * num_kv_heads) * head_dim).to(dtype)

    q, k, v = qkv.view(batch.num_tokens, -1, head_dim).split([num_heads, num_kv_heads, num_kv_heads], 1)
    q, k = (reference.rotate(x, rope, batch.positions) for x in (q, k))
    reference.write_kv(k, v, batch, twin, 1)
    want = reference.attention(q, batch, twin, 1)

    kernels.rope_and_store(qkv, rope, batch, cache, 1)
    got = kernels.attention(qkv, cache, 1, kernels.plan(batch, cache))
    coarser = max(dtype, DTYPES[kv_dtype], key=TOLERANCE.__getitem__)
    close(cache.pool.nan_to_num(0.5), twin.pool.nan_to_num(0.5), coarser)
    assert torch.isfinite(got.float()).all()
    close(got.view_as(want), want, coarser)


def history(cache: KVCache, chunks: list[tuple[int, int]]) -> Batch:
    """A batch over scattered blocks: the past of every sequence is random, all else NaN or huge."""
    block_size = cache.layout.block_size
    tables = scattered_tables([sum(chunk) for chunk in chunks], block_size, cache.num_blocks)
    cache.pool.fill_(float("nan")).masked_fill_(torch.rand(cache.pool.shape) < 0.5, 3e38)
    for table, (_, past) in zip(tables, chunks, strict=True):
        for position in range(past):
            slot = cache.pool[table[position // block_size], :, :, :, position % block_size]
            slot.copy_(torch.randn(slot.shape))
    return Batch.build(
        [Chunk([0] * new, past, table) for (new, past), table in zip(chunks, tables, strict=True)], block_size
    )


@pytest.mark.parametrize("scale", [1e-3, 1.0, 40.0])
def test_decode_softmax_survives_large_scores(kernels: Kernels, scale: float) -> None:
    torch.manual_seed(2)
    cache = KVCache(KVLayout(1, 1, 64, 16, "fp32"), 64)
    batch = history(cache, [(1, 500)])
    rope = torch.stack((torch.ones(512, 32), torch.zeros(512, 32)), 1)
    qkv = torch.randn(1, 4 * 64)
    qkv[:, : 2 * 64] *= scale
    kernels.rope_and_store(qkv, rope, batch, cache, 0)
    want = reference.attention(qkv[:, : 2 * 64].view(1, 2, 64), batch, cache, 0)
    close(kernels.attention(qkv, cache, 0, kernels.plan(batch, cache)).view_as(want), want, torch.float32)


def test_without_a_compiler_torch_serves(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setattr(native_build.shutil, "which", lambda _: None)
    config = tiny_config()
    assert select.select_kernels(config, layout_of(config), tmp_path).name == "torch"


def test_a_failing_compiler_is_not_fatal(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CC", "false")
    with pytest.raises(native_build.BuildFailed, match="false failed"):
        native_build.build(tmp_path)
    config = tiny_config()
    assert select.select_kernels(config, layout_of(config), tmp_path).name == "torch"
    assert not list(tmp_path.glob("*.tmp"))


def test_what_native_cannot_do_is_named() -> None:
    config = tiny_config()
    assert native.unsupported(config, layout_of(config)) == ""
    assert "fp16" in native.unsupported(config, layout_of(config, kv_dtype="fp16"))


@pytest.mark.parametrize(
    ("flags", "chosen"), [({"avx2"}, "fp32"), ({"avx512_bf16"}, "bf16"), ({"amx_bf16"}, "bf16")]
)
def test_auto_dtype_follows_the_cpu(flags: set[str], chosen: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engine.models.dtype.cpu_flags", lambda: frozenset(flags))
    dtype, reason = resolve_dtype("auto")
    assert dtype == chosen
    assert "bf16 instructions" in reason
    assert resolve_dtype("fp32") == ("fp32", "as set")
    assert resolve_dtype("bf16")[0] == "bf16"


@pytest.mark.parametrize(("setting", "says"), [("fp16", "use bf16 or fp32"), ("int4", "choose auto, fp32")])
def test_unusable_dtypes_are_refused(setting: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        resolve_dtype(setting)


@pytest.mark.parametrize("seed", range(100))
def test_rows_of_random_shapes(kernels: Kernels, dtype: torch.dtype, seed: int) -> None:
    """Norms, activation and head norm on shapes drawn at random: 200 cases a kernel set and kernel."""
    rng = random.Random(seed)
    rows, width, head_dim = rng.randint(1, 40), 32 * rng.randint(1, 24), 16 * rng.randint(2, 16)
    torch.manual_seed(seed)
    x, delta, weight = (torch.randn(n, width).to(dtype) for n in (rows, rows, 1))
    x *= rng.choice([1e-3, 1.0, 30.0])
    close(kernels.rms_norm(x, weight[0], 1e-5), reference.rms_norm(x, weight[0], 1e-5), dtype)
    residual = x + delta
    close(
        kernels.add_rms_norm(delta, x, weight[0], 1e-5), reference.rms_norm(residual, weight[0], 1e-5), dtype
    )
    close(x, residual, dtype)
    gate_up = torch.randn(rows, 2 * width).to(dtype) * rng.choice([1.0, 20.0])
    close(kernels.silu_mul(gate_up), reference.silu_mul(gate_up), dtype)
    kv_heads, group = rng.randint(1, 3), rng.randint(1, 4)
    layout = KVLayout(1, kv_heads, head_dim, 16, "fp32")
    qkv = torch.randn(rows, (group + 2) * kv_heads * head_dim).to(dtype)
    q_weight, k_weight = (torch.randn(head_dim).to(dtype) for _ in range(2))
    want = qkv.clone()
    reference.head_norm(want, q_weight, k_weight, 1e-6, layout)
    kernels.head_norm(qkv, q_weight, k_weight, 1e-6, layout)
    close(qkv, want, dtype)
