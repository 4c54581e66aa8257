"""What a load costs those who decode meanwhile: gaps between the tokens of two streams while a prompt comes.

    python -m benchmarks.tiers_itl [--tokens 2048] [--repeat 3] [--directory DIR]

One fp32 worker on one core, the client and Redis on the others. A prompt that disk or Redis holds comes up
beside the streams; another one is computed, for comparison. A gap is `beside` when it overlaps the time
between the question and the prompt's own first token, so the step that makes this token is in it.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import tempfile
import time
from contextlib import ExitStack
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from pathlib import Path
from statistics import median

from rich.console import Console
from rich.table import Table

from benchmarks.redis_server import start_redis
from benchmarks.tiers import BLOCK_SIZE, VOCABULARY, Bench
from benchmarks.workers import Session
from services.children import Child

STREAMS = 2
STREAM_PROMPT, STREAM_TOKENS = 16, 300
ALONE_S = 5.0
"""Streams alone, before the prompt is asked for."""
COLUMNS = ("prompt from", "tokens", "TTFT ms", "gap alone ms", "worst", "gap beside ms", "worst")


@dataclass
class Seen:
    """Of prompts from one source; seconds, `worst` of each repetition."""

    tokens: list[int] = field(default_factory=list)
    ttft: list[float] = field(default_factory=list)
    alone: list[float] = field(default_factory=list)
    beside: list[float] = field(default_factory=list)
    worst_alone: list[float] = field(default_factory=list)
    worst_beside: list[float] = field(default_factory=list)

    def row(self, source: str) -> tuple[str, ...]:
        figures = (self.ttft, self.alone, self.worst_alone, self.beside, self.worst_beside)
        return source, f"{median(self.tokens):.0f}", *(f"{1e3 * median(seconds):.0f}" for seconds in figures)


async def measure(bench: Bench, source: str, seen: Seen) -> None:
    """Every prompt that is kept, beside two streams each."""
    tiers = {"disk": bench.disk, "redis": bench.redis()}.get(source, {})
    blocks = bench.shareable // BLOCK_SIZE + 2 + STREAMS * ((STREAM_PROMPT + STREAM_TOKENS) // BLOCK_SIZE + 1)
    with ExitStack() as stack:
        worker, session = bench.start(stack, tiers | {"num_blocks": blocks})
        await bench.warm_up(session)
        for prompt in bench.kept:
            streams = [asyncio.create_task(stream(worker, seed)) for seed in range(STREAMS)]
            await asyncio.sleep(ALONE_S)
            asked_at = time.perf_counter()
            answer = await bench.ask(session, prompt)
            until = asked_at + answer.ttft_s
            gaps = [pair for at in await asyncio.gather(*streams) for pair in pairwise(at)]
            alone = [b - a for a, b in gaps if b < asked_at]
            beside = [b - a for a, b in gaps if b > asked_at and a < until]
            if not alone or not beside:
                raise SystemExit(
                    "the streams did not decode before and beside the prompt: this machine is busy"
                )
            seen.tokens.append(dict(answer.gathered.tier_tokens).get(source, answer.gathered.computed_tokens))
            seen.ttft.append(answer.ttft_s)
            seen.alone += alone
            seen.beside += beside
            seen.worst_alone.append(max(alone))
            seen.worst_beside.append(max(beside))
        await session.close()


async def stream(worker: Child, seed: int) -> list[float]:
    """When each token of an answer came."""
    session = Session(worker)
    prompt = random.Random(seed).choices(VOCABULARY, k=STREAM_PROMPT)
    began = time.perf_counter()
    answer = await session.run(prompt, STREAM_TOKENS)
    await session.close()
    return list(accumulate((began + answer.ttft_s, *answer.itl_s)))


async def compare(bench: Bench) -> Table:
    await bench.fill()
    table = Table(*COLUMNS, title=f"gaps between tokens of {STREAMS} streams; medians")
    for source in ("disk", "redis", "computed"):
        seen = Seen()
        await measure(bench, source, seen)
        table.add_row(*seen.row(source))
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description="Decoding beside a load from disk or Redis.")
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--directory", help="where the disk tier is; default: the temporary directory")
    given = parser.parse_args()
    *others, core = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, others or [core])
    with tempfile.TemporaryDirectory(dir=given.directory) as name, ExitStack() as stack:
        bench = Bench(given.tokens, given.repeat - 1, "fp32", Path(name), start_redis(stack), core)
        Console(width=140).print(asyncio.run(compare(bench)))


if __name__ == "__main__":
    main()
