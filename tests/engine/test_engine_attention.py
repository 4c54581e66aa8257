"""Attention of every CPU kernel set against its torch twin: random batches on a poisoned pool, with and without
a sliding window; and rows that must be the same bit for bit in every batch."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch
from kernel_sets import native_kernels
from tiny_llama import run_chunks, scattered_tables, tiny_config, tiny_runner

from core.blocks import num_blocks_for
from core.errors import ConfigError
from core.kv import BLOCK_SIZES, KVLayout
from engine.batch import Batch, Chunk
from engine.kernels import reference, select
from engine.kernels.interface import Kernels
from engine.kernels.torch_kernels import TorchKernels
from engine.kv_cache import KVCache

TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 2e-2}
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
NUM_CASES = 240


def native(window: int = 0) -> Kernels:
    return native_kernels(window) or pytest.skip("no C compiler")


class Case:
    """A random batch: the past of every sequence is in the pool, all else NaN or huge; with a window the table
    entries of blocks that no row sees name a poisoned block.
    """

    def __init__(self, seed: int, kv_dtype: str, dtype: torch.dtype) -> None:
        rng = random.Random(seed)
        torch.manual_seed(seed)
        self.group, num_kv_heads = rng.choice([1, 1, 2, 3, 4, 5, 7, 8]), rng.choice([1, 2, 3])
        head_dim, block_size = rng.choice([64, 80, 96, 128, 32, 256]), rng.choice(BLOCK_SIZES)
        self.num_heads, self.window = self.group * num_kv_heads, rng.choice([0, 0, 1, 7, 33, 64, 150])
        num_seqs = rng.randint(1, 3)
        lengths = [
            (rng.choice([1, 1, 2, 9, 70]), rng.choice([0, 1, 17, 63, 64, 150])) for _ in range(num_seqs)
        ]
        needed = sum(num_blocks_for(sum(each), block_size) for each in lengths)
        self.cache = KVCache(KVLayout(2, num_kv_heads, head_dim, block_size, kv_dtype), needed + 1)
        self.cache.pool.fill_(float("nan"))[:, :, :, :, ::3] = 3e38
        tables = scattered_tables([sum(each) for each in lengths], block_size, needed, seed)
        for table, (_, past) in zip(tables, lengths, strict=True):
            first_seen = max(0, past + 1 - self.window) if self.window else 0
            for i in range(num_blocks_for(past, block_size)):
                if i < first_seen // block_size:
                    table[i] = needed
                else:
                    tokens = self.cache.pool[table[i], 1, :, :, : past - i * block_size]
                    tokens.copy_(torch.randn(tokens.shape))
        chunks = [Chunk([0] * new, past, t) for (new, past), t in zip(lengths, tables, strict=True)]
        self.batch = Batch.build(chunks, block_size)
        self.rope = torch.randn(512, 2, head_dim // 2)
        width = (self.num_heads + 2 * num_kv_heads) * head_dim
        self.qkv = torch.randn(self.batch.num_tokens, width).to(dtype)

    def want(self) -> torch.Tensor:
        """By the twins, on a copy of the pool."""
        layout, batch = self.cache.layout, self.batch
        twin = KVCache(layout, self.cache.num_blocks)
        twin.pool.copy_(self.cache.pool)
        heads = self.qkv.view(batch.num_tokens, -1, layout.head_dim)
        q, k, v = heads.split([self.num_heads, layout.num_kv_heads, layout.num_kv_heads], 1)
        q, k = (reference.rotate(x, self.rope, batch.positions) for x in (q, k))
        reference.write_kv(k, v, batch, twin, 1)
        return reference.attention(q, batch, twin, 1, self.window).view(batch.num_tokens, -1)

    def got(self, kernels: Kernels) -> torch.Tensor:
        qkv = self.qkv.clone()
        kernels.rope_and_store(qkv, self.rope, self.batch, self.cache, 1)
        return kernels.attention(qkv, self.cache, 1, kernels.plan(self.batch, self.cache))


@pytest.mark.parametrize("kv_dtype", DTYPES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ["torch", "native"])
def test_attention_is_its_twin(name: str, dtype: str, kv_dtype: str) -> None:
    for seed in range(NUM_CASES // 4):
        case = Case(seed, kv_dtype, DTYPES[dtype])
        want = case.want()
        got = case.got(native(case.window) if name == "native" else TorchKernels(case.window))
        tolerance = max(TOLERANCE[DTYPES[dtype]], TOLERANCE[DTYPES[kv_dtype]])
        torch.testing.assert_close(
            got.float(),
            want.float(),
            rtol=tolerance,
            atol=tolerance,
            msg=lambda m, seed=seed: f"seed {seed}: {m}",
        )


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=str)
def test_heads_are_normed_one_by_one(dtype: torch.dtype) -> None:
    kernels = native()
    torch.manual_seed(3)
    for rows, num_heads, num_kv_heads, head_dim in ((1, 4, 2, 64), (40, 6, 1, 80), (7, 3, 3, 128)):
        layout = KVLayout(1, num_kv_heads, head_dim, 16, "fp32")
        qkv = (torch.randn(rows, (num_heads + 2 * num_kv_heads) * head_dim) * 3).to(dtype)
        q_weight, k_weight = torch.randn(2, head_dim).to(dtype)
        want = qkv.clone()
        reference.head_norm(want, q_weight, k_weight, 1e-6, layout)
        kernels.head_norm(qkv, q_weight, k_weight, 1e-6, layout)
        torch.testing.assert_close(qkv, want, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=str)
@pytest.mark.parametrize("width", [64, 576])
def test_a_product_does_not_depend_on_the_number_of_rows(dtype: torch.dtype, width: int) -> None:
    kernels = native()
    torch.manual_seed(4)
    x, weight, bias = (
        torch.randn(300, width).to(dtype),
        torch.randn(203, width).to(dtype),
        torch.randn(203).to(dtype),
    )
    whole, logits = kernels.linear(x, weight, bias), kernels.logits(x, weight)
    rng = random.Random(5)
    for rows in (1, 2, 3, 4, 5, 6, 7, 17, 32, 33, 255, 257):
        first = rng.randrange(300 - rows)
        part = x[first : first + rows].contiguous()
        assert torch.equal(kernels.linear(part, weight, bias), whole[first : first + rows]), rows
        assert torch.equal(kernels.logits(part, weight), logits[first : first + rows]), rows


@pytest.mark.parametrize("window", [0, 40])
@pytest.mark.parametrize("dtype", DTYPES)
def test_logits_do_not_depend_on_batch_or_chunks(dtype: str, window: int, tmp_path: Path) -> None:
    """Each of several prompts alone in one piece, then all together cut at random, in random company."""
    rng = random.Random(window)
    kernels = native(window)
    runner = tiny_runner(kernels, tmp_path, tiny_config(6, 2), block_size=8, dtype=dtype, kv_dtype=dtype)
    prompts = [rng.choices(range(97), k=n) for n in (1, 3, 64, 65, 130, 290)]
    tables = scattered_tables([len(prompt) for prompt in prompts], 8, runner.cache.num_blocks)
    alone = [
        run_chunks(runner, Chunk(prompt, 0, table, 0)) for prompt, table in zip(prompts, tables, strict=True)
    ]
    for _ in range(6):
        runner.cache.pool.fill_(float("nan"))
        done = [0] * len(prompts)
        while any(n < len(prompt) for n, prompt in zip(done, prompts, strict=True)):
            left = [i for i, prompt in enumerate(prompts) if done[i] < len(prompt)]
            step = rng.sample(left, rng.randint(1, len(left)))
            sizes = {i: min(len(prompts[i]) - done[i], rng.choice([1, 1, 5, 40, 200])) for i in step}
            chunks = [
                Chunk(prompts[i][done[i] : done[i] + n], done[i], tables[i], 0) for i, n in sizes.items()
            ]
            rows = run_chunks(runner, *chunks).split(list(sizes.values()))
            for (i, n), got in zip(sizes.items(), rows, strict=True):
                assert torch.equal(got, alone[i][done[i] : done[i] + n])
                done[i] += n


def test_deterministic_without_a_compiler_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CC", "false")
    config = tiny_config()
    layout = KVLayout(config.num_layers, config.num_kv_heads, config.head_dim, 16, "fp32")
    with pytest.raises(ConfigError, match="install a C compiler"):
        select.select_kernels(config, layout, tmp_path, deterministic=True)
