"""Steps of one model on one pool: chunks, batches and block sizes change nothing; GOLD is reproduced."""

from __future__ import annotations

import functools
import json
import os
import random
from pathlib import Path

import pytest
import torch
from tiny_llama import (
    TinyCheckpoint,
    dense_logits,
    layout_of,
    run_chunks,
    scattered_tables,
    tiny_config,
    tiny_runner,
)

from checkpoint.open import open_checkpoint
from core.blocks import num_blocks_for
from core.errors import ConfigError
from core.settings import Settings
from engine.batch import Batch, Chunk
from engine.kernels.interface import Kernels
from engine.kernels.torch_kernels import TorchKernels
from engine.kv_cache import KVCache
from engine.models.llama import Llama
from engine.models.rope import rope_frequencies
from engine.models.weights import load_weights
from engine.profile import largest_decodes, largest_steps, small_steps, typical_steps
from engine.runner import ModelRunner
from engine.step import Limits
from services.worker.pool import make_pool

pytest_plugins = ["kernel_sets"]

GOLD = json.loads((Path(__file__).parents[1] / "data" / "gold.json").read_text())["cases"]
GAP, LOGPROB_ERROR = 1e-3, 1e-3
CACHE_DIR = os.environ.get("BATON_CACHE_DIR", "~/.cache/baton")
SHORT = 12
"""Tokens of each answer that the default run checks."""


def prompt(length: int, seed: int = 0) -> list[int]:
    generator = random.Random(seed)
    return [generator.randrange(97) for _ in range(length)]


# ---- batches


def test_batch_puts_single_tokens_first_and_keeps_the_order_of_logits() -> None:
    chunks = [
        Chunk([1, 2, 3], 14, [9, 4], logits_from=1),
        Chunk([4], 16, [5, 7], logits_from=0),
        Chunk([5, 6], 0, [3]),
        Chunk([7], 0, [2, 99], logits_from=0),
    ]
    batch = Batch.build(chunks, 16)
    assert batch.token_ids.tolist() == [4, 7, 1, 2, 3, 5, 6]
    assert batch.positions.tolist() == [16, 0, 14, 15, 16, 0, 1]
    assert batch.slots.tolist() == [7 * 16, 2 * 16, 9 * 16 + 14, 9 * 16 + 15, 4 * 16, 48, 49]
    assert batch.q_starts == (0, 1, 2, 5, 7)
    assert batch.kv_lens.tolist() == [17, 1, 17, 2]
    assert batch.block_tables.tolist() == [[5, 7], [2, 0], [9, 4], [3, 0]]
    assert batch.logits_rows.tolist() == [3, 4, 0, 1]
    assert (batch.num_decodes, batch.num_tokens, batch.num_seqs) == (2, 7, 4)


@pytest.mark.parametrize(
    ("chunks", "says"),
    [
        ([], "at least one chunk"),
        ([Chunk([], 0, [])], "at least one token"),
        ([Chunk([1], 16, [0])], "needs 2 blocks"),
    ],
)
def test_impossible_batches_are_refused(chunks: list[Chunk], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        Batch.build(chunks, 16)


# ---- the pool


def test_pool_over_a_shared_buffer_and_its_bytes() -> None:
    layout = layout_of(tiny_config(), kv_dtype="bf16")
    buffer = bytearray(b"\xff" * (4 * layout.block_nbytes))
    cache = KVCache(layout, 4, memoryview(buffer))
    assert not any(buffer)
    cache.keys(1).numbers[1, 2, 5, 7] = 1.0
    at = 2 * layout.block_nbytes + 2 * ((((1 * 2 + 1) * 2 + 0) * 16 + 5) * 32 + 7)
    assert buffer[at : at + 2] == b"\x80\x3f"
    cache.copy_block(2, 0)
    assert buffer[: layout.block_nbytes] == buffer[2 * layout.block_nbytes : 3 * layout.block_nbytes]
    assert torch.equal(cache.keys(1).load(torch.tensor([3, 2]))[1, 16:], cache.keys(1).numbers[1, 2])
    with pytest.raises(ConfigError, match="lower num_blocks"):
        KVCache(layout, 5, memoryview(buffer))


# ---- steps on the tiny model


@pytest.mark.parametrize("block_size", [8, 16, 32])
@pytest.mark.parametrize("size", [1, 7, 16, 31])
def test_chunked_prefill_equals_one_shot(
    kernels: Kernels, block_size: int, size: int, tmp_path: Path
) -> None:
    runner, ids = tiny_runner(kernels, tmp_path, block_size=block_size), prompt(100)
    whole, parts = scattered_tables([100, 100], block_size, runner.cache.num_blocks)
    want = run_chunks(runner, Chunk(ids, 0, whole, logits_from=0))
    got = [run_chunks(runner, Chunk(ids[at : at + size], at, parts, 0)) for at in range(0, 100, size)]
    torch.testing.assert_close(torch.cat(got), want, rtol=1e-4, atol=1e-4)


def test_sequences_of_one_step_do_not_touch_each_other(kernels: Kernels, tmp_path: Path) -> None:
    runner = tiny_runner(kernels, tmp_path)
    prompts = [prompt(length, length) for length in (40, 1, 33, 16, 17, 5)]
    tables = scattered_tables([len(p) + 1 for p in prompts], 16, runner.cache.num_blocks)
    alone = [run_chunks(runner, Chunk(p, 0, t, len(p) - 1)) for p, t in zip(prompts, tables, strict=True)]
    runner.cache.pool.fill_(float("nan"))
    together = run_chunks(runner, *[Chunk(p, 0, t, len(p) - 1) for p, t in zip(prompts, tables, strict=True)])
    torch.testing.assert_close(together, torch.cat(alone), rtol=1e-4, atol=1e-4)
    mixed = run_chunks(
        runner,
        Chunk([3], 40, tables[0], 0),
        Chunk(prompts[2], 0, tables[2], None),
        Chunk([4], 16, tables[3], 0),
    )
    assert mixed.shape == (2, 97)
    torch.testing.assert_close(
        mixed[1], run_chunks(runner, Chunk([4], 16, tables[3], 0))[0], rtol=1e-4, atol=1e-4
    )


def test_a_chunk_without_logits_still_writes_its_blocks(kernels: Kernels, tmp_path: Path) -> None:
    runner, ids = tiny_runner(kernels, tmp_path), prompt(33)
    assert run_chunks(runner, Chunk(ids[:32], 0, [3, 1])).shape == (0, 97)
    got = run_chunks(runner, Chunk(ids[32:], 32, [3, 1, 2], 0))
    want = run_chunks(runner, Chunk(ids, 0, [4, 5, 6], 32))
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)


def test_a_copied_block_is_as_good_as_the_original(kernels: Kernels, tmp_path: Path) -> None:
    runner, ids = tiny_runner(kernels, tmp_path), prompt(30)
    run_chunks(runner, Chunk(ids[:29], 0, [0, 1]))
    runner.copy_block(1, 7)
    want = run_chunks(runner, Chunk(ids[29:], 29, [0, 1], 0))
    assert torch.equal(run_chunks(runner, Chunk(ids[29:], 29, [0, 7], 0)), want)


@pytest.mark.parametrize("kv_dtype", ["bf16", "fp16"])
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_narrow_kv_gives_nearly_the_same_logits(
    dtype: str, kv_dtype: str, kernels: Kernels, tmp_path: Path
) -> None:
    if kv_dtype == "fp16":
        kernels = TorchKernels()
    ids, config = prompt(50), tiny_config()
    want = dense_logits(TinyCheckpoint(config), ids, rope_frequencies(config))
    runner = tiny_runner(kernels, tmp_path, dtype=dtype, kv_dtype=kv_dtype)
    got = [run_chunks(runner, Chunk(ids[at : at + 20], at, [5, 2, 9, 1], 0)) for at in range(0, 50, 20)]
    error = (torch.cat(got) - want).norm() / want.norm()
    assert error < 0.05


def test_warm_up_leaves_a_clean_pool_however_small(kernels: Kernels, tmp_path: Path) -> None:
    limits = Limits(16, 512, 8, 64, 8)
    runner = tiny_runner(kernels, tmp_path)
    runner.warm_up([*largest_steps(limits, 100), largest_decodes(limits), *small_steps(limits)])
    assert not runner.cache.pool[0].any()
    assert runner.cache.pool[1:].isnan().all()


def test_the_steps_before_serving_are_the_largest_and_the_smallest() -> None:
    limits = Limits(16, 512, 8, 64, 8)
    chunk, mixed = largest_steps(limits, history=100)
    assert [(len(c), c.start, len(c.block_table)) for c in chunk] == [(64, 100, 11)]
    assert [len(c) for c in mixed] == [1] * 7 + [57]
    assert chunk[0].logits_from == 0
    assert largest_steps(limits, history=512)[0][0].start == 512 - 64
    assert [(len(c), c.start) for c in largest_decodes(limits)] == [(1, 511)] * 8
    assert [len(step) for step in small_steps(limits)] == [1, 4]


@pytest.mark.parametrize(
    ("limits", "steps"),
    [
        (Limits(16, 2048, 8, 256, 8), [[(0, 16)], [(0, 64)], [(1000, 1)] * 4, [(1000, 64)]]),
        (Limits(16, 512, 2, 2048, 8), [[(0, 32)], [(0, 128)], [(384, 1)] * 2, [(384, 128)]]),
        (Limits(16, 2, 1, 1, 8), [[(0, 2)], [(0, 2)], [(0, 1)], [(0, 2)]]),
    ],
)
def test_the_steps_that_are_timed_first(limits: Limits, steps: list[list[tuple[int, int]]]) -> None:
    assert [[(chunk.start, len(chunk)) for chunk in step] for step in typical_steps(limits)] == steps


def test_a_new_worker_knows_how_long_its_steps_take(tmp_path: Path) -> None:
    config = tiny_config()
    model = Llama(config, load_weights(TinyCheckpoint(config), "fp32", tmp_path), TorchKernels(), 512)
    limits = Limits(16, 512, 4, 64, 8)
    settings, device = Settings.model_validate({}), torch.device("cpu")
    pool = make_pool(settings, model, layout_of(config), limits, device, "life", num_blocks=8)
    assert not pool.runner.cache.raw.any()
    prefill, decode = pool.times.prefill, pool.times.decode
    assert (prefill.num_steps, decode.num_steps) == (3, 3)
    assert 0 < decode.seconds(1, 1) < 10
    assert 0 < prefill.seconds(16, 128) < 10
    for region in pool.regions:
        region.close()


@pytest.mark.parametrize(
    ("limits", "prompts", "mixed"),
    [
        (Limits(16, 512, 64, 2048, 8), [512] * 4, [1] * 60 + [512, 512, 512, 452]),
        (Limits(16, 512, 2, 2048, 8), [512] * 2, [512] * 2),
        (Limits(16, 512, 1, 64, 8), [64], [64]),
        (Limits(16, 4096, 64, 2048, 8), [2048], [1] * 63 + [1985]),
        (Limits(16, 512, 64, 32, 8), [32], [1] * 64),
    ],
)
def test_the_largest_steps_fill_the_budget(limits: Limits, prompts: list[int], mixed: list[int]) -> None:
    steps = largest_steps(limits, history=512)
    assert [[len(chunk) for chunk in step] for step in steps] == [prompts, mixed]
    for step in steps:
        assert all(chunk.start + len(chunk) <= limits.max_model_len for chunk in step)
        Batch.build(step, limits.block_size)


def test_the_largest_steps_give_as_many_logits_as_prompts_may_ask_for() -> None:
    for step in largest_steps(Limits(16, 200, 64, 2048, 8), history=0):
        num_decodes = sum(len(chunk) == 1 for chunk in step)
        num_prompts = len(step) - num_decodes
        rows = len(Batch.build(step, 16).logits_rows)
        assert rows == num_decodes + 256 + (num_prompts - 2)


# ---- GOLD on the embedded model


@functools.cache
def embedded_model(kernels: Kernels, dtype: str) -> Llama:
    checkpoint = open_checkpoint("")
    weights = load_weights(checkpoint, dtype, CACHE_DIR)
    return Llama(checkpoint.config, weights, kernels)


def embedded_runner(kernels: Kernels, block_size: int, num_tokens: int, dtype: str = "fp32") -> ModelRunner:
    model = embedded_model(kernels, dtype)
    layout = layout_of(model.config, block_size, dtype)
    cache = KVCache(layout, num_blocks_for(num_tokens, block_size))
    cache.pool.fill_(float("nan"))
    return ModelRunner(model, cache)


def check_against_gold(runner: ModelRunner, case: dict, num_tokens: int, chunk: int = 256) -> None:
    """Greedy, but fed with GOLD's tokens, so that a tie does not end the comparison."""
    ids, outputs = case["prompt_ids"], case["output_ids"][:num_tokens]
    table = list(range(runner.cache.num_blocks))[::-1]
    for at in range(0, len(ids), chunk):
        part = ids[at : at + chunk]
        logits = run_chunks(runner, Chunk(part, at, table, len(part) - 1))
    for step, want in enumerate(outputs):
        logprobs = logits[0].log_softmax(-1)
        best = int(logprobs.argmax())
        assert best == want or logprobs[best] - logprobs[want] < GAP, f"token {step}"
        assert logprobs[want] == pytest.approx(case["logprobs"][step], abs=LOGPROB_ERROR), f"token {step}"
        if step + 1 < len(outputs):
            logits = run_chunks(runner, Chunk([want], len(ids) + step, table, 0))


FAST_CASES = [
    ("story-1", 16), ("story-15", 16), ("story-16", 16), ("story-17", 8), ("story-32", 32), ("story-33", 8),
    ("story-65", 16), ("story-128", 32), ("story-257", 16), ("text-zh", 16), ("text-alphabet", 8),
    ("chat-capital", 16), ("chat-turns", 32),
]  # fmt: skip


@pytest.mark.parametrize(("name", "block_size"), FAST_CASES)
def test_gold(best_kernels: Kernels, name: str, block_size: int) -> None:
    case = next(case for case in GOLD if case["name"] == name)
    check_against_gold(embedded_runner(best_kernels, block_size, len(case["prompt_ids"]) + 48), case, SHORT)


def test_gold_with_torch_kernels() -> None:
    case = next(case for case in GOLD if case["name"] == "chat-math")
    check_against_gold(embedded_runner(TorchKernels(), 16, 128), case, SHORT, chunk=20)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("block_size", [8, 16, 32])
@pytest.mark.parametrize("case", GOLD, ids=[case["name"] for case in GOLD])
def test_gold_whole(best_kernels: Kernels, case: dict, block_size: int) -> None:
    check_against_gold(embedded_runner(best_kernels, block_size, len(case["prompt_ids"]) + 48), case, 48)


def test_bf16_logits_of_the_embedded_model_are_finite_and_close(kernels: Kernels) -> None:
    case = next(case for case in GOLD if case["name"] == "chat-capital")
    runner, ids = embedded_runner(kernels, 16, 128, "bf16"), case["prompt_ids"]
    logits = run_chunks(runner, Chunk(ids, 0, range(8), len(ids) - 1))
    assert torch.isfinite(logits).all()
    got = float(logits[0].log_softmax(-1)[case["output_ids"][0]])
    assert got == pytest.approx(case["logprobs"][0], abs=0.2)
