"""What a number format costs in quality: perplexity on public-domain prose, and agreement with GOLD.

    python -m benchmarks.quality [--formats fp32,bf16,fp32+int8,bf16+int8] [--kv fp32 int8 k8v4/skip=0,29]
                                 [--tokens 20000] [--threads 1]

Windows of 1,024 tokens, each predicted from its own beginning. "Same best token" counts the positions
whose most likely token is that of the first row; "GOLD" those of tests/data/gold.json, fed with
GOLD's tokens, so that one difference does not end the comparison.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
from collections.abc import Iterator
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

from benchmarks.engine_cells import BLOCK, CACHE_DIR, make_runner
from checkpoint.open import open_checkpoint
from engine.batch import Batch, Chunk
from engine.kernels.native import NativeKernels
from engine.runner import ModelRunner

WINDOW, CHUNK = 1024, 128
PROSE = Path(__file__).with_name("data") / "prose.txt"
GOLD = Path(__file__).parents[1] / "tests" / "data" / "gold.json"


def predictions(runner: ModelRunner, ids: list[int], first: int = 0) -> Iterator[tuple[int, torch.Tensor]]:
    """(position, fp32 logits [n, vocab] from there on) of a sequence that fits the pool, from `first` on."""
    for start in range(0, len(ids), CHUNK):
        piece = ids[start : start + CHUNK]
        wanted = max(first - start, 0)
        if wanted >= len(piece):
            runner.run(Batch.build([Chunk(piece, start, range(WINDOW // BLOCK))], BLOCK))
            continue
        chunk = Chunk(piece, start, range(WINDOW // BLOCK), wanted)
        yield start + wanted, runner.run(Batch.build([chunk], BLOCK))


def read_prose(runner: ModelRunner, ids: list[int]) -> tuple[float, torch.Tensor]:
    """Perplexity, and the most likely token at every predicted position."""
    total, best = 0.0, []
    for begin in range(0, len(ids), WINDOW):
        window = ids[begin : begin + WINDOW]
        for at, logits in predictions(runner, window):
            targets = torch.tensor(window[at + 1 : at + 1 + len(logits)])
            logprobs = logits[: len(targets)].log_softmax(-1)
            total -= float(logprobs.gather(1, targets[:, None]).double().sum())
            best.append(logprobs.argmax(-1))
    found = torch.cat(best)
    return math.exp(total / len(found)), found


def gold_agreement(runner: ModelRunner) -> float:
    """Share of GOLD's output tokens that are this format's most likely ones too."""
    hits = count = 0
    for case in json.loads(GOLD.read_text())["cases"]:
        prompt, outputs = case["prompt_ids"], case["output_ids"]
        if len(prompt) + len(outputs) > WINDOW:
            continue
        for at, logits in predictions(runner, prompt + outputs[:-1], len(prompt) - 1):
            first = at - len(prompt) + 1
            wanted = torch.tensor(outputs[first : first + len(logits)])
            hits += int((logits.argmax(-1) == wanted).sum())
            count += len(wanted)
    return hits / count


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--formats", default="fp32,bf16,fp32+int8,bf16+int8")
    parser.add_argument("--kv", nargs="+", default=["auto"], help="KV dtypes, each with every format")
    parser.add_argument("--tokens", type=int, default=20_000)
    parser.add_argument("--threads", type=int, default=1)
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    ids = open_checkpoint("").load_tokenizer().encode(PROSE.read_text())[: given.tokens]
    table = Table(
        "format", "perplexity", "change", "same best token", "GOLD", title=f"quality, {len(ids):,} tokens"
    )
    base: tuple[float, torch.Tensor] | None = None
    for number_format, kv in itertools.product(given.formats.split(","), given.kv):
        runner = make_runner(number_format, NativeKernels(CACHE_DIR), WINDOW, kv)
        perplexity, best = read_prose(runner, ids)
        base = base or (perplexity, best)
        table.add_row(
            number_format if kv == "auto" else f"{number_format}, KV {kv}",
            f"{perplexity:.3f}",
            f"{perplexity / base[0] - 1:+.2%}",
            f"{(best == base[1]).double().mean().item():.1%}",
            f"{gold_agreement(runner):.1%}",
        )
    Console(width=120).print(table)


if __name__ == "__main__":
    main()
