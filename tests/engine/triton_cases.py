"""Random cases for the Triton kernels and what each must give, on `DEVICE`.

Used by tests/engine (interpreted, after `interpreted_triton`) and by tests/gpu (compiled). Fresh memory is NaN
during a check, so a number that a kernel fails to write, or reads before it is written, shows.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from hypothesis import strategies as st
from tiny_llama import scattered_tables

from core.kv import KVLayout
from engine.batch import Batch, Chunk
from engine.kernels import reference
from engine.kernels.triton.decode import decode_attention
from engine.kernels.triton.prefill import prefill_attention
from engine.kv_cache import KVCache

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
FP32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
TOLERANCE = {FP32: 2e-5, FP16: 4e-3, BF16: 2e-2}
NUM_LAYERS, LAYER = 2, 1

seeds = st.integers(0, 2**31)
dtypes = st.sampled_from([FP32, BF16, FP16])
kv_dtypes = st.sampled_from([FP32, BF16, FP16, E4M3, E5M2])


def close(got: torch.Tensor, want: torch.Tensor, dtype: torch.dtype) -> None:
    tolerance = TOLERANCE[dtype]
    torch.testing.assert_close(got.float().cpu(), want.float().cpu(), rtol=tolerance, atol=tolerance)


@contextmanager
def poisoned() -> Iterator[None]:
    """torch fills fresh tensors with NaN."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        assert torch.empty(1).isnan().all()
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def noise(*shape: int, dtype: torch.dtype = FP32, scale: float = 1.0) -> torch.Tensor:
    return (torch.randn(shape) * scale).to(dtype).to(DEVICE)


def as_stored(values: torch.Tensor, dtype: torch.dtype, scale: float) -> torch.Tensor:
    """What the pool should hold for fp32 `values`: divided by the scale, saturated, rounded to nearest even."""
    if dtype not in (E4M3, E5M2):
        return values.to(dtype)
    largest = torch.finfo(dtype).max
    return (values / scale).clamp(-largest, largest).to(dtype)


@dataclass(frozen=True)
class Geometry:
    """`group` query heads share one of `num_kv_heads`."""

    num_kv_heads: int
    group: int
    head_dim: int
    block_size: int
    dtype: torch.dtype
    kv_dtype: torch.dtype
    k_scale: float = 1.0
    v_scale: float = 1.0

    @property
    def num_heads(self) -> int:
        return self.num_kv_heads * self.group

    @property
    def qkv_width(self) -> int:
        return (self.num_heads + 2 * self.num_kv_heads) * self.head_dim

    def pool(self, num_blocks: int) -> torch.Tensor:
        """All NaN."""
        shape = (num_blocks, NUM_LAYERS, self.num_kv_heads, 2, self.block_size, self.head_dim)
        return torch.full(shape, float("nan")).to(self.kv_dtype).to(DEVICE)


@st.composite
def geometries(draw: st.DrawFn, head_dims: tuple[int, ...] = (64, 80, 96, 128, 256)) -> Geometry:
    kv_dtype = draw(kv_dtypes)
    is_fp8 = kv_dtype in (E4M3, E5M2)
    return Geometry(
        num_kv_heads=draw(st.integers(1, 2)),
        group=draw(st.sampled_from([1, 2, 3, 4, 5, 8])),
        head_dim=draw(st.sampled_from(head_dims)),
        block_size=draw(st.sampled_from([8, 16, 32, 64])),
        dtype=draw(dtypes),
        kv_dtype=kv_dtype,
        k_scale=draw(st.sampled_from([0.02, 1.0, 1.7])) if is_fp8 else 1.0,
        v_scale=draw(st.sampled_from([0.05, 1.0, 2.3])) if is_fp8 else 1.0,
    )


@dataclass(frozen=True)
class AttentionCase:
    """`chunks`: (new tokens, tokens before them) of each sequence; `window` 0 for none."""

    geometry: Geometry
    chunks: tuple[tuple[int, int], ...]
    window: int
    q_scale: float
    seed: int


@st.composite
def attention_cases(
    draw: st.DrawFn, max_new: int = 20, max_past: int = 80, max_seqs: int = 2
) -> AttentionCase:
    decode = st.tuples(st.just(1), st.integers(0, max_past))
    chunk = st.tuples(st.integers(2, max_new), st.integers(0, max_past))
    one_of_each = st.tuples(decode, chunk)
    more = st.lists(decode | chunk, max_size=max_seqs - 2)
    chunks = [*draw(one_of_each), *draw(more)]
    window = draw(st.just(0) | st.integers(1, 48))
    q_scale = draw(st.sampled_from([0.01, 1.0, 4.0]))
    return AttentionCase(
        draw(geometries()), tuple(draw(st.permutations(chunks))), window, q_scale, draw(seeds)
    )


def history(case: AttentionCase) -> tuple[Batch, torch.Tensor]:
    """The batch and its pool: K and V of each sequence as far as its tokens may see, all else NaN."""
    geometry, block_size = case.geometry, case.geometry.block_size
    lengths = [new + past for new, past in case.chunks]
    num_blocks = sum(-(-length // block_size) for length in lengths) + 2
    tables = scattered_tables(lengths, block_size, num_blocks - 1, seed=case.seed)
    pool, unused = geometry.pool(num_blocks), num_blocks - 1
    for table, (new, past) in zip(tables, case.chunks, strict=True):
        oldest = max(0, past - case.window + 1) if case.window else 0
        for position in range(oldest, new + past):
            slot = pool[table[position // block_size], LAYER, :, :, position % block_size]
            slot.copy_(noise(*slot.shape).to(pool.dtype))
        # Blocks that fell out of the window belong to somebody else by now.
        table[: oldest // block_size] = [unused] * (oldest // block_size)
    batch = Batch.build(
        [Chunk([0] * new, past, table) for (new, past), table in zip(case.chunks, tables, strict=True)],
        block_size,
    )
    return batch, pool


def expected_attention(
    case: AttentionCase, batch: Batch, pool: torch.Tensor, q: torch.Tensor
) -> torch.Tensor:
    """The reference's answer, fp32, from the pool's numbers times their scales."""
    g = case.geometry
    twin = KVCache(KVLayout(NUM_LAYERS, g.num_kv_heads, g.head_dim, g.block_size, "fp32"), pool.shape[0])
    scales = torch.tensor([g.k_scale, g.v_scale]).view(2, 1, 1)
    twin.pool.copy_(pool.cpu().float() * scales)
    q = q.cpu().float()
    if not case.window:
        return reference.attention(q, batch, twin, LAYER)
    return torch.cat([_row(case, batch, twin, q, row) for row in range(batch.num_tokens)])


def _row(case: AttentionCase, batch: Batch, twin: KVCache, q: torch.Tensor, row: int) -> torch.Tensor:
    """One row of windowed attention, [1, heads, head_dim], by SDPA over the tokens it sees."""
    seq = next(s for s in range(batch.num_seqs) if row < batch.q_starts[s + 1])
    position = int(batch.positions[row])
    seen = torch.arange(max(0, position - case.window + 1), position + 1)
    blocks, offsets = batch.block_tables[seq][seen // batch.block_size].long(), seen % batch.block_size
    k, v = (part(LAYER)[blocks, :, offsets].transpose(0, 1) for part in (twin.keys, twin.values))
    grouped = q[row].view(case.geometry.num_kv_heads, case.geometry.group, -1)
    return torch.nn.functional.scaled_dot_product_attention(grouped, k, v).reshape(1, *q.shape[1:])


def run_attention(case: AttentionCase, batch: Batch, pool: torch.Tensor, qkv: torch.Tensor) -> torch.Tensor:
    """Both attention kernels over one batch, each checked to leave the other's rows alone."""
    g = case.geometry
    lens, tables = batch.kv_lens.to(DEVICE), batch.block_tables.to(DEVICE)
    starts = torch.tensor(batch.q_starts, dtype=torch.int32, device=DEVICE)
    longest = max(new for new, _ in case.chunks)
    n, scales = batch.num_decodes, (g.k_scale, g.v_scale)
    out = torch.full((batch.num_tokens, g.num_heads * g.head_dim), float("nan"), dtype=g.dtype, device=DEVICE)
    if n:
        decode_attention(qkv, pool[:, LAYER], out, n, lens, tables, case.window, *scales)
        assert out[n:].isnan().all()
    decoded = out[:n].clone()
    if n < batch.num_seqs:
        prefill_attention(qkv, pool[:, LAYER], out, starts, n, longest, lens, tables, case.window, *scales)
    assert torch.equal(out[:n], decoded)
    return out.view(batch.num_tokens, g.num_heads, g.head_dim)


def check_attention(case: AttentionCase) -> None:
    torch.manual_seed(case.seed)
    batch, pool = history(case)
    g = case.geometry
    qkv = noise(batch.num_tokens, g.qkv_width, dtype=g.dtype, scale=case.q_scale)
    q = qkv.view(batch.num_tokens, -1, g.head_dim)[:, : g.num_heads]
    want = expected_attention(case, batch, pool, q)
    with poisoned():
        got = run_attention(case, batch, pool, qkv)
    close(got, want, g.dtype)
