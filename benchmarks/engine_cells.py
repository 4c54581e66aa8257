"""Baton's engine without a server around it: one number format's cells, one JSON object a line.

    OMP_NUM_THREADS=1 OMP_WAIT_POLICY=passive python -m benchmarks.engine_cells [--format bf16] [--kv int8]
                                                                                [--seconds 2]

Prefill runs in chunks of 256 tokens; decode is one step over a pool full of random numbers.
"""

from __future__ import annotations

import os

import torch

from benchmarks import cells
from checkpoint.open import open_checkpoint
from core.blocks import num_blocks_for
from core.kv import KVLayout, parse_layers
from core.settings import Settings
from engine.batch import Chunk
from engine.kernels.interface import Kernels
from engine.kernels.native import NativeKernels
from engine.kv_cache import KVCache
from engine.models.registry import model_class
from engine.models.weights import load_weights
from engine.runner import ModelRunner

BLOCK, CHUNK = 16, 256
CACHE_DIR = os.path.expanduser(str(Settings.model_fields["cache_dir"].default))


def make_runner(number_format: str, kernels: Kernels, num_tokens: int, kv: str = "auto") -> ModelRunner:
    """The embedded model on a pool of `num_tokens` tokens.

    `number_format`: a dtype, or a dtype and a quantization such as bf16+int8. `kv`: a KV dtype, which may
    have layers to skip as in int8/skip=0,29; auto: the dtype.
    """
    dtype, _, quantization = number_format.partition("+")
    checkpoint = open_checkpoint("")
    config = checkpoint.config
    weights = load_weights(checkpoint, dtype, CACHE_DIR, quantization=quantization or "none")
    kv_dtype, _, skipped = (dtype if kv == "auto" else kv).partition("/skip=")
    layout = KVLayout(
        config.num_layers,
        config.num_kv_heads,
        config.head_dim,
        BLOCK,
        kv_dtype,
        parse_layers(skipped, config.num_layers),
    )
    model = model_class(config.architecture)(config, weights, kernels)
    return ModelRunner(model, KVCache(layout, num_tokens // BLOCK, None))


class BatonEngine:
    """`cells.Engine` on a pool that holds the largest batch."""

    def __init__(self, number_format: str, kv: str) -> None:
        most = max(batch for batch, _ in cells.DECODES)
        self._runner = make_runner(number_format, NativeKernels(CACHE_DIR), most * cells.MAX_TOKENS, kv)
        cache, tokens = self._runner.cache, torch.arange(BLOCK)
        for layer in range(cache.layout.num_layers):
            for runs in (cache.keys(layer), cache.values(layer)):
                numbers = torch.randn(BLOCK, cache.layout.num_kv_heads, cache.layout.head_dim)
                runs.store(numbers, torch.zeros_like(tokens), tokens)
        cache.raw[1:] = cache.raw[0]  # drawing all of it would take longer than most cells

    def prefill(self, ids: list[int]) -> object:
        table = range(num_blocks_for(len(ids), BLOCK))
        for start in range(0, len(ids), CHUNK):
            piece = ids[start : start + CHUNK]
            is_last = start + CHUNK >= len(ids)
            self._runner.run_chunks([Chunk(piece, start, table, len(piece) - 1 if is_last else None)])

    def decode_s(self, batch: int, context: int, seconds: float) -> float:
        width = num_blocks_for(context + 1, BLOCK)
        chunks = [Chunk([1000 + i], context, range(i * width, (i + 1) * width), 0) for i in range(batch)]
        return cells.best(lambda: self._runner.run_chunks(chunks), seconds)


def main() -> None:
    parser = cells.options("Measure Baton's engine in one number format.")
    parser.add_argument("--kv", default="auto", help="KV dtype, as int8 or int8/skip=0,29; auto = the dtype")
    given = parser.parse_args()
    engine = BatonEngine(given.format, given.kv)
    engine.prefill([1000])
    cells.say_ready()
    cells.say_cells(engine, given.seconds)


if __name__ == "__main__":
    main()
