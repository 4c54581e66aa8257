"""The Triton kernels on the device: right (against the torch twins), and how near the roofline.

Shapes are those of an 8B model in bf16: hidden 4096, 32 heads, 8 KV heads of 128, inner 14336, blocks of 16.
Run by `benchmarks.gpu`.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F

from benchmarks.gpu_roofline import Case, Run, apart
from core.kv import KVLayout
from engine.batch import Batch, Chunk
from engine.kernels import reference
from engine.kernels.triton import activation, block_copy, norm, rope
from engine.kernels.triton import sample as sampling
from engine.kernels.triton.kernels import TritonKernels
from engine.kv_cache import KVCache
from engine.upload import upload

HIDDEN, HEADS, KV_HEADS, DIM, INNER, VOCAB, BLOCK = 4096, 32, 8, 128, 14336, 128256, 16
QKV = (HEADS + 2 * KV_HEADS) * DIM
TOKENS, NUM_BLOCKS, LAYERS, ROWS = 4096, 512, 32, 64
EPS = 1e-5


def kernel_cases(device: torch.device) -> Iterator[Case]:
    """One after the other: each holds its tensors only while it is measured."""
    torch.manual_seed(0)
    yield from _row_cases(device)
    yield from _copy_cases(device)
    yield _logits_case(device)
    yield _sample_case(device)


def _noise(device: torch.device, *shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.randn(shape, device=device).to(dtype)


# ---- row by row


def _row_cases(device: torch.device) -> Iterator[Case]:
    x, delta = _noise(device, TOKENS, HIDDEN), _noise(device, TOKENS, HIDDEN)
    weight, shape = _noise(device, HIDDEN), f"{TOKENS} x {HIDDEN}"

    def add_error() -> float:
        residual = x.clone()
        got = norm.add_rms_norm(delta, residual, weight, EPS)
        return max(apart(residual, x + delta), apart(got, reference.rms_norm(residual, weight, EPS)))

    yield Case(
        "rms_norm",
        shape,
        lambda: apart(norm.rms_norm(x, weight, EPS), reference.rms_norm(x, weight, EPS)),
        lambda: norm.rms_norm(x, weight, EPS),
        2 * x.nbytes,
        rival=lambda: F.rms_norm(x, (HIDDEN,), weight, EPS),
    )
    residual = x.clone()
    yield Case(
        "add_rms_norm",
        shape,
        add_error,
        lambda: norm.add_rms_norm(delta, residual, weight, EPS),
        4 * x.nbytes,
        rival=lambda: F.rms_norm(residual.add_(delta), (HIDDEN,), weight, EPS),
    )
    gate_up = _noise(device, TOKENS, 2 * INNER)
    yield Case(
        "silu_mul",
        f"{TOKENS} x {INNER}",
        lambda: apart(activation.silu_mul(gate_up), reference.silu_mul(gate_up)),
        lambda: activation.silu_mul(gate_up),
        1.5 * gate_up.nbytes,
        rival=lambda: F.silu(gate_up[:, :INNER]) * gate_up[:, INNER:],
    )
    yield from _head_cases(device)


def _head_cases(device: torch.device) -> Iterator[Case]:
    layout = KVLayout(1, KV_HEADS, DIM, BLOCK, "bf16")
    cache = KVCache(layout, TOKENS // BLOCK, device=device)
    qkv, gains = _noise(device, TOKENS, QKV), (_noise(device, DIM), _noise(device, DIM))
    table = torch.randn(8192, 2, DIM // 2, device=device)
    batch = upload(Batch.build([Chunk([0] * TOKENS, 0, range(TOKENS // BLOCK))], BLOCK), device)
    num_kv = KV_HEADS * DIM

    def norm_error() -> float:
        got, want = qkv.clone(), qkv.clone()
        norm.head_norm(got, *gains, EPS, layout)
        reference.head_norm(want, *gains, EPS, layout)
        return apart(got, want)

    def store_error() -> float:
        got = qkv.clone()
        rope.rope_and_store(got, table, batch.positions, batch.slots, cache.pool[:, 0])
        heads = qkv.view(TOKENS, -1, DIM)
        want = reference.rotate(heads[:, :-KV_HEADS], table, batch.positions)
        stored = cache.pool[:, 0].transpose(1, 3).reshape(TOKENS, 2, KV_HEADS, DIM)
        exact = torch.equal(stored[:, 0], got.view_as(heads)[:, HEADS:-KV_HEADS])
        exact &= torch.equal(stored[:, 1], heads[:, -KV_HEADS:])
        return apart(got.view_as(heads)[:, :-KV_HEADS], want) if exact else torch.inf

    work = qkv.clone()
    element = qkv.element_size() * TOKENS
    yield Case(
        "head_norm",
        f"{TOKENS} x {HEADS + KV_HEADS} heads",
        norm_error,
        lambda: norm.head_norm(work, *gains, EPS, layout),
        2 * element * (QKV - num_kv),
    )
    yield Case(
        "rope_and_store",
        f"{TOKENS} x {HEADS}/{KV_HEADS} heads",
        store_error,
        lambda: rope.rope_and_store(work, table, batch.positions, batch.slots, cache.pool[:, 0]),
        element * (QKV + QKV - num_kv + 2 * num_kv) + TOKENS * DIM * 4,
    )


# ---- whole blocks and slices of heads


def _copy_cases(device: torch.device) -> Iterator[Case]:
    pool = KVCache(KVLayout(LAYERS, KV_HEADS, DIM, BLOCK, "bf16"), NUM_BLOCKS, device=device).pool
    pool.copy_(torch.randn(pool.shape[1:], device=device))
    pool.mul_(torch.arange(NUM_BLOCKS, device=device).view(-1, *[1] * (pool.dim() - 1)))
    ids = torch.randperm(NUM_BLOCKS, device=device)[: NUM_BLOCKS // 2].int()
    for heads in (None, range(KV_HEADS // 2)):
        chosen = slice(None) if heads is None else slice(heads.start, heads.stop)
        what = f"{len(ids)} blocks" + (f", {len(heads)} of {KV_HEADS} heads" if heads else "")
        buffer = torch.empty_like(pool[: len(ids), :, chosen]).contiguous()

        def gather(buffer: torch.Tensor = buffer, heads: range | None = heads) -> None:
            block_copy.gather_blocks(pool, ids, buffer, heads)

        def scatter(buffer: torch.Tensor = buffer, heads: range | None = heads) -> None:
            block_copy.scatter_blocks(pool, ids, buffer, heads)

        def gather_error(buffer: torch.Tensor = buffer, run: Run = gather, chosen: slice = chosen) -> float:
            run()
            return 0.0 if torch.equal(buffer, pool[ids.long()][:, :, chosen]) else torch.inf

        def scatter_error(buffer: torch.Tensor = buffer, run: Run = scatter, chosen: slice = chosen) -> float:
            buffer.add_(1.0)
            want = pool.clone()
            want[ids.long(), :, chosen] = buffer
            run()
            return 0.0 if torch.equal(pool, want) else torch.inf

        rival = (
            (lambda buffer=buffer: torch.index_select(pool, 0, ids, out=buffer)) if heads is None else None
        )
        yield Case("gather_blocks", what, gather_error, gather, 2 * buffer.nbytes, rival=rival)
        yield Case("scatter_blocks", what, scatter_error, scatter, 2 * buffer.nbytes)


# ---- behind the last layer


def _logits_case(device: torch.device) -> Case:
    x, weight = _noise(device, ROWS, HIDDEN), _noise(device, VOCAB, HIDDEN)
    kernels = TritonKernels()
    return Case(
        "logits (cuBLAS)",
        f"{ROWS} x {VOCAB}",
        lambda: apart(kernels.logits(x, weight), reference.linear(x, weight)),
        lambda: kernels.logits(x, weight),
        weight.nbytes + ROWS * VOCAB * 4,
    )


def _sample_case(device: torch.device) -> Case:
    logits = torch.randn(ROWS, VOCAB, device=device) * 3
    params = torch.tensor([[0.8, 50, 0.9, 0.0, i / ROWS] for i in range(ROWS)], device=device)

    def error() -> float:
        """Draws lie on edges of sums at times; nearly all must be the twin's."""
        same = sampling.sample(logits, params).cpu() == reference.sample(logits.cpu(), params.cpu())
        return 0.0 if float(same.float().mean()) > 0.95 else torch.inf

    def by_sorting() -> torch.Tensor:
        best, ids = (logits / 0.8).softmax(-1).sort(-1, descending=True)
        best = best * ((best.cumsum(-1) - best) < 0.9)
        at = torch.searchsorted(best.cumsum(-1), params[:, 4:] * best.sum(-1, keepdim=True), right=True)
        return ids.gather(-1, at.clamp(max=VOCAB - 1))

    run = lambda: sampling.sample(logits, params)  # noqa: E731
    return Case("sample (top-k, top-p)", f"{ROWS} x {VOCAB}", error, run, logits.nbytes, rival=by_sorting)
