"""What one engine reaches on this machine, without any server around it.

    python -m benchmarks.engine [--formats fp32,bf16,bf16+int8] [--threads 1] [--kernels native,torch]

Prefill runs in chunks of 256 tokens; decode times one step over a filled pool. Best of the repetitions
in wall time.
"""

from __future__ import annotations

import argparse
import os
import random
import time
from collections.abc import Callable

import torch
from rich.console import Console
from rich.table import Table

from checkpoint.open import open_checkpoint
from core.kv import KVLayout
from core.settings import Settings
from engine.batch import Batch, Chunk
from engine.kernels.interface import Kernels
from engine.kernels.native import NativeKernels
from engine.kernels.torch_kernels import TorchKernels
from engine.kv_cache import KVCache
from engine.models.registry import model_class
from engine.models.weights import load_weights
from engine.runner import ModelRunner

BLOCK, CHUNK = 16, 256
CACHE_DIR = os.path.expanduser(str(Settings.model_fields["cache_dir"].default))


def make_runner(number_format: str, kernels: Kernels, num_tokens: int) -> ModelRunner:
    """The embedded model on a pool of `num_tokens` tokens in its dtype.

    `number_format`: a dtype, or a dtype and a quantization such as bf16+int8.
    """
    dtype, _, quantization = number_format.partition("+")
    checkpoint = open_checkpoint("")
    config = checkpoint.config
    weights = load_weights(checkpoint, dtype, CACHE_DIR, quantization=quantization or "none")
    layout = KVLayout(config.num_layers, config.num_kv_heads, config.head_dim, BLOCK, dtype)
    model = model_class(config.architecture)(config, weights, kernels)
    return ModelRunner(model, KVCache(layout, num_tokens // BLOCK, None))


def best(run: Callable[[], None], repeat: int) -> float:
    """Shortest of `repeat` runs in seconds, after one to warm up."""
    run()
    times = []
    for _ in range(repeat):
        started = time.perf_counter()
        run()
        times.append(time.perf_counter() - started)
    return min(times)


def prefill(runner: ModelRunner, tokens: int) -> float:
    """Tokens per second of one prompt."""
    ids, table = random.Random(0).choices(range(1000, 40_000), k=tokens), range(-(-tokens // BLOCK))

    def run() -> None:
        for start in range(0, tokens, CHUNK):
            piece = ids[start : start + CHUNK]
            last = len(piece) - 1 if start + CHUNK >= tokens else None
            runner.run(Batch.build([Chunk(piece, start, table, last)], BLOCK))

    return tokens / best(run, 3)


def decode(runner: ModelRunner, batch: int, context: int) -> float:
    """Milliseconds of one step of `batch` sequences with `context` tokens each."""
    width = -(-(context + 1) // BLOCK)
    chunks = [Chunk([1000 + i], context, range(i * width, (i + 1) * width), 0) for i in range(batch)]
    return 1e3 * best(lambda: _step(runner, chunks), 20)


def _step(runner: ModelRunner, chunks: list[Chunk]) -> None:
    runner.run(Batch.build(chunks, BLOCK))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--formats", default="fp32,bf16,bf16+int8")
    parser.add_argument("--kernels", default="native,torch")
    parser.add_argument("--threads", type=int, default=1)
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    columns = (
        "format",
        "kernels",
        "prefill 512, tok/s",
        "prefill 1,500",
        "decode 1 x 256, ms",
        "8 x 256",
        "8 x 2,000",
    )
    table = Table(*columns, title=f"engine, {given.threads} thread(s)")
    for number_format in given.formats.split(","):
        for name in given.kernels.split(","):
            kernels: Kernels = NativeKernels(CACHE_DIR) if name == "native" else TorchKernels()
            runner = make_runner(number_format, kernels, 8 * 2048)
            cells = [f"{prefill(runner, n):.0f}" for n in (512, 1500)]
            cells += [f"{decode(runner, *shape):.1f}" for shape in ((1, 256), (8, 256), (8, 2000))]
            table.add_row(number_format, name, *cells)
    Console(width=120).print(table)


if __name__ == "__main__":
    main()
