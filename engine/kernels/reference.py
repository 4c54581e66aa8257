"""Plain torch twins of every kernel: slow, short, in fp32; what all kernel sets are tested against.

Each takes and gives the same tensors as its method of `engine.kernels.interface.Kernels`; `sample` those of
the sampler's kernel on a GPU.
"""

from __future__ import annotations

import torch

from core.kv import KVLayout
from engine.batch import Batch
from engine.kv_cache import KVCache, Runs


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
    for row, slot in enumerate(batch.slots):
        at = (slot[None] // batch.block_size, slot[None] % batch.block_size)
        cache.keys(layer).store(k[row, None], *at)
        cache.values(layer).store(v[row, None], *at)


def attention(q: torch.Tensor, batch: Batch, cache: KVCache, layer: int, window: int = 0) -> torch.Tensor:
    """Row by row over the paged history: q [T, heads, head_dim] -> the same shape and dtype.

    `window` > 0: a token sees itself and the window - 1 tokens before it; blocks before these are not read.
    """
    group = q.shape[1] // cache.layout.num_kv_heads
    out = torch.empty_like(q)
    for seq, (first, end) in enumerate(zip(batch.q_starts, batch.q_starts[1:], strict=False)):
        for row in range(first, end):
            end_token = int(batch.positions[row]) + 1
            first_token = max(0, end_token - window) if window else 0
            k = _history(cache, cache.keys(layer), batch.block_tables[seq], first_token, end_token)
            v = _history(cache, cache.values(layer), batch.block_tables[seq], first_token, end_token)
            k, v = k.repeat_interleave(group, 0), v.repeat_interleave(group, 0)
            scores = torch.einsum("hd,htd->ht", q[row].float(), k) * q.shape[-1] ** -0.5
            out[row] = torch.einsum("ht,htd->hd", scores.softmax(-1), v).to(q.dtype)
    return out


def _history(cache: KVCache, runs: Runs, table: torch.Tensor, first: int, end: int) -> torch.Tensor:
    """fp32 [kv heads, end - first, head_dim]."""
    block_size = cache.layout.block_size
    first_block = first // block_size
    skipped = first_block * block_size
    tokens = runs.load(table[first_block : -(-end // block_size)])
    return tokens[:, first - skipped : end - skipped].float()


def gather_blocks(
    pool: torch.Tensor, block_ids: torch.Tensor, buffer: torch.Tensor, heads: range, buffer_heads: range
) -> None:
    """buffer[i, :, buffer_heads] = pool[block_ids[i], :, heads], a head at a time."""
    for nth, block_id in enumerate(block_ids.tolist()):
        for head, into in zip(heads, buffer_heads, strict=True):
            buffer[nth, :, into] = pool[block_id, :, head]


def scatter_blocks(
    pool: torch.Tensor, block_ids: torch.Tensor, buffer: torch.Tensor, heads: range, buffer_heads: range
) -> None:
    """pool[block_ids[i], :, heads] = buffer[i, :, buffer_heads], a head at a time."""
    for nth, block_id in enumerate(block_ids.tolist()):
        for head, out_of in zip(heads, buffer_heads, strict=True):
            pool[block_id, :, head] = buffer[nth, :, out_of]


NUM_SAMPLE_PARAMS = 5
"""Per row: temperature, top-k, top-p, min-p and the uniform number to draw with."""


def sample(logits: torch.Tensor, params: torch.Tensor) -> torch.Tensor:
    """Token ids int32 [n] from fp32 logits [n, vocab]; params fp32 [n, NUM_SAMPLE_PARAMS].

    Temperature 0 takes the largest logit, the first of equals. Else filters keep, in this order: the top_k
    largest (0: all); of these the fewest largest that hold top_p of their probability; of these what has at
    least min_p times the largest probability. Tokens tied with the last kept one are kept too. The draw is
    the first kept token, in the order of ids, up to which more than `uniform` of what is kept lies.
    """
    return torch.tensor(
        [_sample_row(row, *values) for row, values in zip(logits.float(), params.tolist(), strict=True)],
        dtype=torch.int32,
    )


def _sample_row(
    logits: torch.Tensor, temperature: float, top_k: float, top_p: float, min_p: float, uniform: float
) -> int:
    if temperature == 0.0:
        return int(logits.argmax())
    weights = ((logits - logits.max()) / temperature).exp().double()
    kept = torch.ones_like(weights, dtype=torch.bool)
    if 0 < top_k < len(logits):
        kept &= logits >= logits.topk(int(top_k)).values[-1]
    if top_p < 1.0:
        order = (weights * kept).argsort(descending=True)
        cumulative = weights[order].mul(kept[order]).cumsum(0)
        enough = int(torch.searchsorted(cumulative, top_p * cumulative[-1]))
        kept &= logits >= logits[order[min(enough, len(order) - 1)]]
    kept &= (weights >= min_p) & (weights > 0)
    cumulative = (weights * kept).cumsum(0)
    at = int(torch.searchsorted(cumulative, uniform * cumulative[-1], right=True))
    return at if at < len(logits) else int(kept.nonzero()[-1])
