"""Plain torch twins of every kernel: slow, short, in fp32; what all kernel sets are tested against.

Each takes and gives the same tensors as its method of `engine.kernels.interface.Kernels`.
"""

from __future__ import annotations

import torch

from core.kv import KVLayout
from engine.batch import Batch
from engine.kv_cache import KVCache


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """fp32 [T, out]."""
    product = x.float() @ weight.float().T
    return product if bias is None else product + bias.float()


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """x / sqrt(mean(x^2) + eps) * weight, in x's dtype (Zhang and Sennrich 2019)."""
    wide = x.float()
    scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return (wide * scale * weight.float()).to(x.dtype)


def head_norm(
    qkv: torch.Tensor, q_weight: torch.Tensor, k_weight: torch.Tensor, eps: float, layout: KVLayout
) -> None:
    """RMS norm of each q and k head of qkv [T, (heads + 2 * kv heads) * head_dim], in place."""
    heads = qkv.view(qkv.shape[0], -1, layout.head_dim)
    first_k, first_v = heads.shape[1] - 2 * layout.num_kv_heads, heads.shape[1] - layout.num_kv_heads
    heads[:, :first_k] = rms_norm(heads[:, :first_k], q_weight, eps)
    heads[:, first_k:first_v] = rms_norm(heads[:, first_k:first_v], k_weight, eps)


def silu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """silu(gate) * up of [T, 2 * n], in the same dtype."""
    gate, up = gate_up.float().chunk(2, dim=-1)
    return (gate * torch.sigmoid(gate) * up).to(gate_up.dtype)


def rotate(x: torch.Tensor, rope: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """Rotary embedding of x [T, heads, head_dim] (Su et al. 2021).

    Pairs are (i, i + head_dim / 2), as in Hugging Face checkpoints.
    """
    cos, sin = rope[positions].unsqueeze(1).unbind(2)
    low, high = x.float().chunk(2, dim=-1)
    return torch.cat((low * cos - high * sin, high * cos + low * sin), dim=-1).to(x.dtype)


def write_kv(k: torch.Tensor, v: torch.Tensor, batch: Batch, cache: KVCache, layer: int) -> None:
    """Write k and v, [T, kv heads, head_dim] each, to `batch.slots`, one row after the other."""
    for row, slot in enumerate(batch.slots.tolist()):
        block, offset = divmod(slot, batch.block_size)
        cache.keys(layer)[block, :, offset] = k[row].to(cache.pool.dtype)
        cache.values(layer)[block, :, offset] = v[row].to(cache.pool.dtype)


def attention(q: torch.Tensor, batch: Batch, cache: KVCache, layer: int) -> torch.Tensor:
    """Row by row over the paged history: q [T, heads, head_dim] -> the same shape and dtype."""
    group = q.shape[1] // cache.layout.num_kv_heads
    out = torch.empty_like(q)
    for seq, (first, end) in enumerate(zip(batch.q_starts, batch.q_starts[1:], strict=False)):
        for row in range(first, end):
            num_visible = int(batch.positions[row]) + 1
            k = _history(cache.keys(layer), batch.block_tables[seq], num_visible)
            v = _history(cache.values(layer), batch.block_tables[seq], num_visible)
            k, v = k.repeat_interleave(group, 0), v.repeat_interleave(group, 0)
            scores = torch.einsum("hd,htd->ht", q[row].float(), k) * q.shape[-1] ** -0.5
            out[row] = torch.einsum("ht,htd->hd", scores.softmax(-1), v).to(q.dtype)
    return out


def _history(pool: torch.Tensor, table: torch.Tensor, num_tokens: int) -> torch.Tensor:
    """fp32 [kv heads, num_tokens, head_dim] from a view [num_blocks, kv heads, block_size, head_dim]."""
    blocks = pool[table.long()].transpose(0, 1)
    return blocks.reshape(pool.shape[1], -1, pool.shape[3])[:, :num_tokens].float()
