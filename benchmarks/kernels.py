"""What each CPU kernel reaches on this machine, next to torch's own in the same run.

    python -m benchmarks.kernels [--threads 1] [--repeat 15]

Decode attention is timed over the layers of a whole model, so that no K and V are left in the caches, and
SDPA on contiguous K and V, which is what it would cost without pages. Every call is timed alone, kernels
take turns, and the lower quartile counts: on a shared machine the mean says more about its other guests.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table

from core.kv import KVLayout
from core.settings import Settings
from engine.batch import Batch, Chunk
from engine.kernels.native import NativeKernels
from engine.kv_cache import KVCache

LAYERS, HEADS, KV_HEADS, HEAD_DIM, BLOCK = 30, 9, 3, 64, 16
HIDDEN, INNER = 576, 3072
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
CACHE_DIR = os.path.expanduser(str(Settings.model_fields["cache_dir"].default))

Call = Callable[[], object]


def seconds(rivals: dict[str, list[Call]], repeat: int) -> dict[str, float]:
    """Of each rival, the sum over its calls of each call's lower quartile."""
    times: dict[tuple[str, int], list[float]] = {}
    for _ in range(repeat + 1):
        for name, calls in rivals.items():
            for i, call in enumerate(calls):
                started = time.perf_counter()
                call()
                times.setdefault((name, i), []).append(time.perf_counter() - started)
    return {
        name: sum(sorted(times[name, i][1:])[repeat // 4] for i in range(len(calls)))
        for name, calls in rivals.items()
    }


def make_cache(dtype: str, num_tokens: int) -> KVCache:
    cache = KVCache(KVLayout(LAYERS, KV_HEADS, HEAD_DIM, BLOCK, dtype), num_tokens // BLOCK)
    cache.pool.normal_()
    return cache


def scattered(num_blocks: int, num_seqs: int) -> list[list[int]]:
    return torch.randperm(num_blocks, generator=torch.Generator().manual_seed(0)).view(num_seqs, -1).tolist()


def decode(kernels: NativeKernels, dtype: str, num_seqs: int, context: int, repeat: int) -> list[str]:
    """One step's attention of all layers."""
    cache = make_cache(dtype, num_seqs * context)
    tables = scattered(cache.num_blocks, num_seqs)
    batch = Batch.build([Chunk([0], context - 1, table) for table in tables], BLOCK)
    plan = kernels.plan(batch, cache)
    qkv = torch.randn(num_seqs, (HEADS + 2 * KV_HEADS) * HEAD_DIM).to(DTYPES[dtype])
    q = qkv[:, : HEADS * HEAD_DIM].reshape(num_seqs, KV_HEADS, -1, HEAD_DIM)
    kv = [torch.randn(2, num_seqs, KV_HEADS, context, HEAD_DIM).to(DTYPES[dtype]) for _ in range(LAYERS)]
    took = seconds(
        {
            "native": [lambda i=i: kernels.attention(qkv, cache, i, plan) for i in range(LAYERS)],
            "sdpa": [lambda k=k, v=v: F.scaled_dot_product_attention(q, k, v) for k, v in kv],
        },
        repeat,
    )
    return row(f"decode attention, {num_seqs} x {context:,}", dtype, took, cache.pool.nbytes, "GB/s")


def prefill(kernels: NativeKernels, dtype: str, history: int, chunk: int, repeat: int) -> list[str]:
    """One layer's attention of a chunk of one prompt, against SDPA with K and V gathered for it already."""
    kv_len = history + chunk
    cache = make_cache(dtype, -(-kv_len // BLOCK) * BLOCK)
    table = scattered(cache.num_blocks, 1)[0]
    batch = Batch.build([Chunk([0] * chunk, history, table)], BLOCK)
    plan = kernels.plan(batch, cache)
    qkv = torch.randn(chunk, (HEADS + 2 * KV_HEADS) * HEAD_DIM).to(DTYPES[dtype])
    q = qkv[:, : HEADS * HEAD_DIM].view(1, chunk, HEADS, HEAD_DIM).transpose(1, 2)
    k, v = torch.randn(2, 1, KV_HEADS, kv_len, HEAD_DIM).to(DTYPES[dtype])
    visible = torch.arange(kv_len) <= torch.arange(history, kv_len)[:, None]
    took = seconds(
        {
            "native": [lambda: kernels.attention(qkv, cache, 0, plan)],
            "sdpa": [lambda: F.scaled_dot_product_attention(q, k, v, attn_mask=visible, enable_gqa=True)],
        },
        repeat,
    )
    pairs = chunk * history + chunk * (chunk + 1) // 2
    return row(
        f"prefill attention, {chunk} after {history:,}", dtype, took, 4 * HEADS * HEAD_DIM * pairs, "GFLOP/s"
    )


def linear(kernels: NativeKernels, dtype: str, rows: int, repeat: int) -> list[str]:
    """The gate-up product; with few rows of all layers, so that weights come from memory."""
    layers = LAYERS if rows <= 16 else 1
    weights = [torch.randn(INNER, HIDDEN).to(DTYPES[dtype]) for _ in range(layers)]
    x = torch.randn(rows, HIDDEN).to(DTYPES[dtype])
    took = seconds(
        {
            "native": [lambda w=w: kernels.linear(x, w) for w in weights],
            "torch": [lambda w=w: F.linear(x, w) for w in weights],
        },
        repeat,
    )
    title = f"linear, {rows} x {HIDDEN} x {INNER}"
    if layers > 1:
        return row(title, dtype, took, layers * weights[0].nbytes, "GB/s")
    return row(title, dtype, took, 2 * rows * HIDDEN * INNER, "GFLOP/s")


def row(title: str, dtype: str, took: dict[str, float], work: int, unit: str) -> list[str]:
    native, other = took.values()
    rates = [f"{work / each / 1e9:.1f}" for each in (native, other)]
    return [title, dtype, f"{native * 1e3:.2f}", f"{other * 1e3:.2f}", *rates, unit, f"{native / other:.2f}"]


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--repeat", type=int, default=15)
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    kernels = NativeKernels(CACHE_DIR)
    columns = ("kernel", "dtype", "ms", "torch, ms", "rate", "torch's", "unit", "time / torch's")
    table = Table(*columns, title=f"CPU kernels, {given.threads} thread(s)")
    for dtype in DTYPES:
        table.add_row(*decode(kernels, dtype, 1, 2000, given.repeat))
        table.add_row(*decode(kernels, dtype, 8, 2000, given.repeat))
        table.add_row(*prefill(kernels, dtype, 0, 256, given.repeat))
        table.add_row(*prefill(kernels, dtype, 1500, 256, given.repeat))
        for rows in (1, 8, 32, 256):
            table.add_row(*linear(kernels, dtype, rows, given.repeat))
    Console(width=120).print(table)


if __name__ == "__main__":
    main()
