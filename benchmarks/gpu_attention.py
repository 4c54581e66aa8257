"""The attention kernels over a scattered pool on the device, beside SDPA on contiguous K and V."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch.nn.attention.bias import causal_lower_right

from benchmarks.gpu_roofline import Case, Run, apart
from core.kv import KVLayout
from engine.batch import Batch, Chunk
from engine.kernels import reference
from engine.kernels.triton.decode import decode_attention
from engine.kernels.triton.prefill import prefill_attention
from engine.kv_cache import KVCache
from engine.upload import upload

HEADS, KV_HEADS, DIM, BLOCK = 32, 8, 128, 16
CHECKED = ((200, 77), (65, 0))
"""(new tokens, tokens before) of the chunks that the twin computes too: row by row, so few"""
PREFILLS = ((0, 4096), (6144, 2048))
"""(tokens before, new tokens)"""
DECODES = (
    (1, 4096, "bf16"), (8, 4096, "bf16"), (64, 512, "bf16"), (64, 4096, "bf16"),
    (64, 4096, "fp8_e4m3"), (64, 4096, "fp8_e5m2"),
)  # fmt: skip
"""(sequences, context, KV dtype)"""


def attention_cases(device: torch.device) -> Iterator[Case]:
    for past, new in PREFILLS:
        yield _prefill(device, past, new)
    for num_seqs, context, kv_dtype in DECODES:
        yield _decode(device, num_seqs, context, kv_dtype)


@dataclass(frozen=True, slots=True)
class _Attention:
    """A batch over a scattered pool of one layer, the twin's answer, and contiguous K and V for SDPA."""

    batch: Batch
    cache: KVCache
    qkv: torch.Tensor
    out: torch.Tensor

    @property
    def pool(self) -> torch.Tensor:
        return self.cache.pool[:, 0]

    def error(self, run: Run) -> float:
        run()
        twin = KVCache(
            KVLayout(1, KV_HEADS, DIM, BLOCK, "fp32"), self.cache.num_blocks, device=self.qkv.device
        )
        twin.pool.copy_(self.cache.pool.to(torch.bfloat16))
        q = self.qkv.view(len(self.qkv), -1, DIM)[:, :HEADS]
        want = reference.attention(q, self.batch, twin, 0)
        return apart(self.out.view_as(want), want)

    def contiguous(self, length: int) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V of the first `length` tokens, bf16 [sequences, KV heads, length, DIM] each."""
        wide = self.cache.pool[:, 0].to(torch.bfloat16)
        blocks = wide[self.batch.block_tables.long()].permute(3, 0, 2, 1, 4, 5)
        k, v = blocks.reshape(2, self.batch.num_seqs, KV_HEADS, -1, DIM)[:, :, :, :length]
        return k.contiguous(), v.contiguous()


def _attention(device: torch.device, chunks: Sequence[tuple[int, int]], kv_dtype: str) -> _Attention:
    """`chunks`: (new tokens, tokens before them)."""
    needs = [-(-(new + past) // BLOCK) for new, past in chunks]
    ids = torch.randperm(sum(needs)).tolist()
    tables = [[ids.pop() for _ in range(need)] for need in needs]
    cache = KVCache(KVLayout(1, KV_HEADS, DIM, BLOCK, kv_dtype), sum(needs), device=device)
    cache.pool.copy_(torch.randn(cache.pool.shape, device=device).to(torch.bfloat16))
    batch = Batch.build(
        [Chunk([0] * new, past, table) for (new, past), table in zip(chunks, tables, strict=True)], BLOCK
    )
    qkv = torch.randn(batch.num_tokens, (HEADS + 2 * KV_HEADS) * DIM, device=device).to(torch.bfloat16)
    out = torch.empty(batch.num_tokens, HEADS * DIM, dtype=qkv.dtype, device=device)
    return _Attention(upload(batch, device), cache, qkv, out)


def _prefill(device: torch.device, past: int, new: int) -> Case:
    small, a = _attention(device, CHECKED, "bf16"), _attention(device, [(new, past)], "bf16")

    def run(of: _Attention, longest: int) -> None:
        b = of.batch
        prefill_attention(of.qkv, of.pool, of.out, b.row_starts, 0, longest, b.kv_lens, b.block_tables)

    k, v = (part.repeat_interleave(HEADS // KV_HEADS, 1) for part in a.contiguous(past + new))
    q = a.qkv.view(new, -1, DIM)[:, :HEADS].transpose(0, 1)[None].contiguous()
    mask = causal_lower_right(new, past + new)
    visible = new * past + new * (new + 1) // 2
    return Case(
        "prefill_attention",
        f"{new} over {past}",
        lambda: small.error(lambda: run(small, max(CHECKED)[0])),
        lambda: run(a, new),
        4 * HEADS * DIM * visible,
        is_flops=True,
        rival=lambda: F.scaled_dot_product_attention(q, k, v, attn_mask=mask),
    )


def _decode(device: torch.device, num_seqs: int, context: int, kv_dtype: str) -> Case:
    a = _attention(device, [(1, context - 1)] * num_seqs, kv_dtype)

    def run() -> None:
        decode_attention(a.qkv, a.pool, a.out, num_seqs, a.batch.kv_lens, a.batch.block_tables)

    k, v = a.contiguous(context)
    q = a.qkv.view(num_seqs, -1, DIM)[:, :HEADS].view(num_seqs, KV_HEADS, -1, DIM).contiguous()
    return Case(
        "decode_attention",
        f"{num_seqs} x {context}" + (f", {kv_dtype}" if kv_dtype != "bf16" else ""),
        lambda: a.error(run),
        run,
        num_seqs * context * a.cache.layout.bytes_per_token,
        rival=lambda: F.scaled_dot_product_attention(q, k, v),
    )
