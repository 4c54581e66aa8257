"""Random batches for the Triton attention kernels and what must come out; see `triton_cases`."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from hypothesis import strategies as st
from tiny_llama import scattered_tables
from triton_cases import DEVICE, FP16, FP32, LAYER, NUM_LAYERS, Geometry, close, noise, poisoned, seeds

from core.kv import KVLayout
from engine.batch import Batch, Chunk
from engine.kernels import reference
from engine.kernels.triton.decode import decode_attention, split_tokens_for
from engine.kernels.triton.prefill import prefill_attention
from engine.kv_cache import KVCache


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
    draw: st.DrawFn, geometry: st.SearchStrategy[Geometry], max_new: int, max_past: int, max_seqs: int = 2
) -> AttentionCase:
    """At least one decode and one longer chunk, so that both kernels see every case."""
    decode = st.tuples(st.just(1), st.integers(0, max_past))
    chunk = st.tuples(st.integers(2, max_new), st.integers(0, max_past))
    chunks = [draw(decode), draw(chunk), *draw(st.lists(decode | chunk, max_size=max_seqs - 2))]
    return AttentionCase(
        geometry=draw(geometry),
        chunks=tuple(draw(st.permutations(chunks))),
        window=draw(st.just(0) | st.integers(1, max_past)),
        q_scale=draw(st.sampled_from([0.01, 1.0, 4.0])),
        seed=draw(seeds),
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
    return reference.attention(q, batch, twin, LAYER, case.window)


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


GEOMETRY = Geometry(2, 3, 64, 16, FP32, FP32)


def decode_rows(chunks: tuple[tuple[int, int], ...]) -> tuple[torch.Tensor, ...]:
    """qkv, one layer of the pool, kv_lens and block tables of a batch of decodes in GEOMETRY."""
    torch.manual_seed(5)
    batch, pool = history(AttentionCase(GEOMETRY, chunks, 0, 1.0, 5))
    qkv = noise(batch.num_tokens, GEOMETRY.qkv_width)
    return qkv, pool[:, LAYER], batch.kv_lens.to(DEVICE), batch.block_tables.to(DEVICE)


def decode_of(
    qkv: torch.Tensor, pool: torch.Tensor, lens: torch.Tensor, tables: torch.Tensor
) -> torch.Tensor:
    out = torch.full((len(lens), GEOMETRY.num_heads * GEOMETRY.head_dim), float("nan"), device=DEVICE)
    decode_attention(qkv, pool, out, len(lens), lens, tables)
    return out


def check_alike_alone_and_in_company() -> None:
    """Bit for bit: a short sequence has one split when alone, several are launched beside a long one."""
    long = 3 * split_tokens_for(1) + 11
    qkv, pool, lens, tables = decode_rows(tuple((1, past) for past in (29, long, 63, 64, 0)))
    together = decode_of(qkv, pool, lens, tables)
    for i, length in enumerate(lens.tolist()):
        width = -(-length // GEOMETRY.block_size)
        alone = decode_of(qkv[i : i + 1], pool, lens[i : i + 1], tables[i : i + 1, :width].contiguous())
        assert torch.equal(alone[0], together[i])


def check_padding(past: int) -> None:
    """A row without tokens, its table pointing at poison, beside a real one."""
    qkv, pool, lens, tables = decode_rows(((1, past), (1, 0)))
    want = decode_of(qkv, pool, lens, tables)
    lens[1], tables[1] = 0, pool.shape[0] - 1
    got = decode_of(qkv, pool, lens, tables)
    assert torch.equal(got[0], want[0])
    assert not got[1].any()


def check_fp8_codes(kv_dtype: torch.dtype) -> None:
    """A token that sees itself alone gives back its V, times the scale: every code in turn."""
    codes = torch.arange(256, dtype=torch.uint8)
    codes[~codes.view(kv_dtype).float().isfinite()] = 0
    pool = torch.zeros(1, 1, 2, 8, 256, dtype=torch.uint8)
    pool[0, 0, 1, 0] = codes
    out, qkv = torch.empty(1, 256, dtype=FP16, device=DEVICE), noise(1, 768, dtype=FP16)
    lens = torch.ones(1, dtype=torch.int32, device=DEVICE)
    decode_attention(
        qkv, pool.to(DEVICE).view(kv_dtype), out, 1, lens, torch.zeros_like(lens)[None], v_scale=0.5
    )
    assert torch.equal(out[0].float().cpu(), codes.view(kv_dtype).float() * 0.5)
