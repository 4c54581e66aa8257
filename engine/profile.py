"""The steps that a worker runs before it serves: the largest ones, which are measured, and the smallest.

Between them they touch every weight and every path of the code, so the first request is no slower.
All block tables name block 0 alone, so a pool of one block is enough; what is computed means nothing.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path

import torch

from core.blocks import num_blocks_for
from engine.batch import Chunk
from engine.step import MAX_PROMPT_LOGPROBS, Limits

FEW_DECODES = (1, 4, 16)
"""Decode batches that choose other code on a CPU."""

TYPICAL_HISTORY = 1000


def largest_steps(limits: Limits, history: int) -> list[list[Chunk]]:
    """The steps that need the most memory: prompts that fill the budget, each behind `history` tokens as far
    as the longest sequence allows, and that beside as many decodes as leave room for them.

    As many rows of logits are wanted as of prompts whose log probabilities are.
    """
    budget, most = limits.max_num_batched_tokens, limits.max_num_seqs
    num_prompts = 1
    while num_prompts < most and num_prompts * limits.max_model_len < budget - (most - num_prompts):
        num_prompts += 1
    num_decodes = most - num_prompts
    return [
        _prompts(budget, most, limits, history),
        [Chunk([0], 0, [0], 0)] * num_decodes
        + _prompts(max(1, budget - num_decodes), num_prompts, limits, history),
    ]


def _prompts(num_tokens: int, at_most: int, limits: Limits, history: int) -> list[Chunk]:
    """Chunks of `num_tokens` tokens together, or as many as `at_most` sequences have."""
    length = min(history + num_tokens, limits.max_model_len)
    table = [0] * num_blocks_for(length, limits.block_size)
    chunks: list[Chunk] = []
    rows = MAX_PROMPT_LOGPROBS
    while num_tokens and len(chunks) < at_most:
        count = min(num_tokens, length)
        wanted = max(1, min(rows, count))
        chunks.append(Chunk([0] * count, length - count, table, count - wanted))
        num_tokens, rows = num_tokens - count, rows - wanted
    return chunks


def largest_decodes(limits: Limits) -> list[Chunk]:
    """The largest step that may run as a captured graph."""
    length = limits.max_model_len
    return [Chunk([0], length - 1, [0] * num_blocks_for(length, limits.block_size), 0)] * limits.max_num_seqs


def small_steps(limits: Limits) -> list[list[Chunk]]:
    """Decodes of a few sequences with a token each, in block 0: what the largest steps do not touch."""
    return [[Chunk([0], 0, [0], 0)] * count for count in FEW_DECODES if count <= limits.max_num_seqs]


def typical_steps(limits: Limits) -> list[list[Chunk]]:
    """Steps that tell what tokens and contexts cost, together a second on a slow core: prompts of a sixteenth
    and a quarter of the budget, one of these and a few decodes behind TYPICAL_HISTORY tokens, or as many as a
    sequence may have."""
    quarter = max(2, min(limits.max_num_batched_tokens, limits.max_model_len) // 4)
    history = max(0, min(TYPICAL_HISTORY, limits.max_model_len - quarter))
    decode = Chunk([0], history, [0] * num_blocks_for(history + 1, limits.block_size), 0)
    few = min(FEW_DECODES[1], limits.max_num_seqs)
    prompts = [_prompt(max(2, quarter // 4), 0, limits), _prompt(quarter, 0, limits)]
    return [*prompts, [decode] * few, _prompt(quarter, history, limits)]


def _prompt(num_tokens: int, history: int, limits: Limits) -> list[Chunk]:
    table = [0] * num_blocks_for(history + num_tokens, limits.block_size)
    return [Chunk([0] * num_tokens, history, table, num_tokens - 1)]


def peak_nbytes(device: torch.device, work: Callable[[], object]) -> int:
    """The most bytes that `work` held at a time beyond what was held before: of torch on CUDA, else RSS."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        work()
        torch.cuda.synchronize(device)
        return torch.cuda.max_memory_allocated(device) - before
    with contextlib.suppress(OSError):  # without it the peak is that since the process began: too high, safe
        Path("/proc/self/clear_refs").write_text("5")
    before = _status_nbytes("VmRSS")
    work()
    return max(0, _status_nbytes("VmHWM") - before)


def _status_nbytes(name: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024
    return 0
