"""Random cases for the Triton kernels around attention, and what each must give; see `triton_cases`."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from hypothesis import strategies as st
from triton_cases import (
    BF16,
    DEVICE,
    LAYER,
    NUM_LAYERS,
    Geometry,
    as_stored,
    close,
    dtypes,
    noise,
    poisoned,
    seeds,
)

from core.kv import KVLayout
from engine.kernels import reference
from engine.kernels.triton.activation import silu_mul
from engine.kernels.triton.norm import add_rms_norm, head_norm, rms_norm
from engine.kernels.triton.rope import rope_and_store


@dataclass(frozen=True)
class RowsCase:
    rows: int
    width: int
    dtype: torch.dtype
    scale: float
    seed: int


rows_cases = st.builds(
    RowsCase,
    rows=st.integers(1, 5),
    width=st.sampled_from([1, 3, 64, 80, 96, 128, 576, 1000, 1500]),
    dtype=dtypes,
    scale=st.sampled_from([1e-3, 1.0, 50.0]),
    seed=seeds,
)


def check_rms_norm(case: RowsCase) -> None:
    torch.manual_seed(case.seed)
    x = noise(case.rows, case.width, dtype=case.dtype, scale=case.scale)
    delta, weight = noise(*x.shape, dtype=case.dtype), noise(case.width, dtype=case.dtype)
    with poisoned():
        close(rms_norm(x, weight, 1e-5), reference.rms_norm(x, weight, 1e-5), case.dtype)
        residual = x.clone()
        got = add_rms_norm(delta, residual, weight, 1e-5)
    close(residual, x + delta, case.dtype)
    close(got, reference.rms_norm(residual, weight, 1e-5), case.dtype)


def check_silu_mul(case: RowsCase) -> None:
    torch.manual_seed(case.seed)
    gate_up = noise(case.rows, 2 * case.width, dtype=case.dtype, scale=case.scale)
    with poisoned():
        got = silu_mul(gate_up)
    close(got, reference.silu_mul(gate_up), case.dtype)


@dataclass(frozen=True)
class StoreCase:
    """`rows` tokens; `padding` of them have no slot."""

    geometry: Geometry
    rows: int
    padding: int
    seed: int


def store_cases(geometry: st.SearchStrategy[Geometry], max_rows: int) -> st.SearchStrategy[StoreCase]:
    return st.builds(
        StoreCase, geometry, rows=st.integers(1, max_rows), padding=st.integers(0, 1), seed=seeds
    )


def check_rope_and_store(case: StoreCase) -> None:
    """q and k are rotated in place, v is not touched, and the pool changes in the slots alone."""
    torch.manual_seed(case.seed)
    g, num_tokens = case.geometry, case.rows + case.padding
    num_blocks = -(-case.rows // g.block_size) + 2
    pool, rope = g.pool(num_blocks), noise(64, 2, g.head_dim // 2)
    slots = torch.randperm(num_blocks * g.block_size)[:num_tokens].to(DEVICE)
    slots[case.rows :] = -1
    positions = torch.randint(0, 64, (num_tokens,)).to(DEVICE)
    qkv = noise(num_tokens, g.qkv_width, dtype=g.dtype)
    heads = qkv.view(num_tokens, -1, g.head_dim)
    rotated = reference.rotate(heads[:, : -g.num_kv_heads], rope, positions)
    want = torch.cat((rotated, heads[:, -g.num_kv_heads :]), 1)
    twin = pool.clone()

    rope_and_store(qkv, rope, positions, slots, pool[:, LAYER], g.k_scale, g.v_scale)
    got = qkv.view_as(want)
    close(got, want, g.dtype)
    assert torch.equal(got[:, -g.num_kv_heads :], want[:, -g.num_kv_heads :])
    k, v = got[: case.rows, g.num_heads :].float().chunk(2, 1)
    for row, slot in enumerate(slots[: case.rows].tolist()):
        block, offset = divmod(slot, g.block_size)
        twin[block, LAYER, :, 0, offset] = as_stored(k[row], g.kv_dtype, g.k_scale)
        twin[block, LAYER, :, 1, offset] = as_stored(v[row], g.kv_dtype, g.v_scale)
    assert_same_pool(pool, twin)


def assert_same_pool(pool: torch.Tensor, twin: torch.Tensor) -> None:
    """Bit for bit, but for fp32 -> bf16 in the interpreter, which cuts where it should round."""
    if pool.dtype == BF16 and DEVICE == "cpu":
        assert torch.equal(pool.isnan(), twin.isnan())
        torch.testing.assert_close(pool.nan_to_num(), twin.nan_to_num(), rtol=2**-7, atol=0)
    else:
        assert torch.equal(_bytes(pool), _bytes(twin))


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(torch.uint8)


def check_fp8_rounding(kv_dtype: torch.dtype) -> None:
    """Like torch: every number of the format, ties between neighbours, what is beyond the largest, NaN."""
    codes = torch.arange(256, dtype=torch.uint8).view(kv_dtype).float()
    exact = codes[codes.isfinite()].unique()
    ties = (exact[1:] + exact[:-1]) / 2
    nudged = torch.cat((torch.nextafter(ties, exact[1:]), torch.nextafter(ties, exact[:-1])))
    edges = torch.tensor([float("inf"), -1e9, 1e-30, -0.0, float("nan")])
    values = torch.cat((exact, ties, nudged, edges, torch.randn(16)))
    values = torch.nn.functional.pad(values, (0, -len(values) % 64)).view(-1, 64).to(DEVICE)
    # v is stored as it stands in qkv: no angle meets it.
    qkv = torch.cat((values, values, values), 1)
    pool = torch.zeros(len(values) // 8 + 1, 1, 2, 8, 64, device=DEVICE).to(kv_dtype)
    rows = torch.arange(len(values), device=DEVICE)
    rope_and_store(qkv, torch.ones(1, 2, 32, device=DEVICE), torch.zeros_like(rows), rows, pool)
    got = pool[:, 0, 1].reshape(-1, 64)[: len(values)].float()
    want = as_stored(values, kv_dtype, 1.0).float()
    assert torch.equal(got.nan_to_num(7e7), want.nan_to_num(7e7))


@dataclass(frozen=True)
class HeadNormCase:
    geometry: Geometry
    rows: int
    scale: float
    seed: int


def head_norm_cases(geometry: st.SearchStrategy[Geometry]) -> st.SearchStrategy[HeadNormCase]:
    return st.builds(
        HeadNormCase, geometry, rows=st.integers(1, 4), scale=st.sampled_from([1e-3, 1.0, 50.0]), seed=seeds
    )


def check_head_norm(case: HeadNormCase) -> None:
    """q and k heads are normed in place, v is not touched."""
    torch.manual_seed(case.seed)
    g = case.geometry
    layout = KVLayout(NUM_LAYERS, g.num_kv_heads, g.head_dim, g.block_size, "fp32")
    qkv = noise(case.rows, g.qkv_width, dtype=g.dtype, scale=case.scale)
    q_weight, k_weight = noise(g.head_dim, dtype=g.dtype), noise(g.head_dim, dtype=g.dtype)
    want = qkv.clone()
    reference.head_norm(want, q_weight, k_weight, 1e-6, layout)
    head_norm(qkv, q_weight, k_weight, 1e-6, layout)
    close(qkv, want, g.dtype)
    first_v = (g.num_heads + g.num_kv_heads) * g.head_dim
    assert torch.equal(qkv[:, first_v:], want[:, first_v:])
