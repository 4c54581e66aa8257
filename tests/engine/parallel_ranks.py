"""A rank of tiny models in a process of its own; it makes the steps that rank 0 makes in the test's process.

    python parallel_ranks.py RANK DEGREE PORT FOLDER

Each model's pool is left in FOLDER, as `pool_file` names it.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import torch
from tiny_llama import TinyCheckpoint, layout_of, scattered_tables, tiny_config

from checkpoint.config import ModelConfig
from engine.batch import Chunk
from engine.kernels.torch_kernels import TorchKernels
from engine.kv_cache import KVCache
from engine.models.llama import Llama
from engine.models.shard import rank_config, rank_weights
from engine.models.weights import load_weights
from engine.parallel import Group, Meeting
from engine.runner import ModelRunner

TIMEOUT_S = 30.0
NUM_BLOCKS = 16
_HEADS = tiny_config(num_heads=12, num_kv_heads=6)
CONFIGS: dict[str, ModelConfig] = {
    "tied": _HEADS,
    "biases-and-head-norms": replace(_HEADS, tie_word_embeddings=False, qkv_bias=True, head_norm=True),
    "int8": replace(_HEADS, intermediate_size=384),
}


def steps() -> list[list[Chunk]]:
    """Prompts in pieces, one that wants no logits, decodes alone and beside a prompt."""
    a, b = scattered_tables([40, 40], 16, NUM_BLOCKS)
    return [
        [Chunk(range(1, 21), 0, a), Chunk(range(30, 50), 0, b, 0)],
        [Chunk(range(21, 31), 20, a, 9), Chunk([7], 20, b, 0)],
        [Chunk([3], 30, a, 0), Chunk([8], 21, b, 0)],
    ]


def make_runner(config: ModelConfig, folder: Path, group: Group | None = None) -> ModelRunner:
    """The whole model, or one rank's part of it."""
    quantization = "int8" if config is CONFIGS["int8"] else "none"
    weights = load_weights(TinyCheckpoint(config), "fp32", folder, quantization=quantization)
    if group:
        weights = rank_weights(config, weights, group.degree, group.rank)
        config = rank_config(config, group.degree)
    cache = KVCache(layout_of(config), NUM_BLOCKS)
    return ModelRunner(Llama(config, weights, TorchKernels(), group=group), cache)


def pool_file(folder: Path, name: str, rank: int) -> Path:
    return folder / f"{name}-{rank}.pool"


def main(rank: int, degree: int, port: int, folder: Path) -> None:
    group = Group(Meeting(TIMEOUT_S, port), rank, degree, TIMEOUT_S)
    for name, config in CONFIGS.items():
        runner = make_runner(config, folder, group)
        for chunks in steps():
            runner.run_chunks(chunks)
        runner.cache.pool.numpy().tofile(pool_file(folder, name, rank))
    group.barrier()


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(*map(int, sys.argv[1:4]), Path(sys.argv[4]))
