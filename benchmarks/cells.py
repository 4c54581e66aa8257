"""The cells of `benchmarks.engine`'s table, and how a process that measures an engine says them.

Standard library alone: peers import this in virtual environments of their own. A process prints one JSON
object a line: `{"start_s", "rss_nbytes"}` once the engine has answered, then `{"cell", "value"}` many times.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

PREFILLS = (200, 512, 1500)
"""Tokens of one prompt."""
DECODES = tuple((batch, context) for context in (256, 2000) for batch in (1, 8, 32))
"""(sequences, tokens that each has in the KV cache)"""
MAX_TOKENS = 2048
"""The longest sequence, rounded up to whole blocks of any size."""


class Engine(Protocol):
    def prefill(self, ids: list[int]) -> object:
        """Compute a prompt up to its last token's logits."""
        ...

    def decode_s(self, batch: int, context: int, seconds: float) -> float | None:
        """Seconds of one step of `batch` sequences, best of about `seconds` of them; None: cannot."""
        ...


def prefill_name(tokens: int) -> str:
    return f"prefill {tokens:,}"


def decode_name(batch: int, context: int) -> str:
    return f"decode {batch} x {context:,}"


def options(description: str) -> argparse.ArgumentParser:
    """The flags of every process that measures one engine."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--format", default="fp32", help="fp32, bf16, bf16+int8: where the engine has it")
    parser.add_argument("--seconds", type=float, default=2.0, help="time for the repetitions of one cell")
    return parser


def best(run: Callable[[], object], seconds: float) -> float:
    """The shortest of at least two runs, in seconds: as many as fit into `seconds`."""
    times: list[float] = []
    ends = time.perf_counter() + seconds
    while len(times) < 2 or time.perf_counter() < ends:
        started = time.perf_counter()
        run()
        times.append(time.perf_counter() - started)
    return min(times)


def prompt(rng: random.Random, tokens: int) -> list[int]:
    """Token ids that stand for ordinary words."""
    return rng.choices(range(1000, 40_000), k=tokens)


def say_ready() -> None:
    """To be called when the engine has answered once."""
    say(start_s=since_start_s(), rss_nbytes=rss_nbytes())


def say_cells(engine: Engine, seconds: float) -> None:
    """Measure and print all cells; prompts differ each time, so that no prefix is known."""
    rng = random.Random(0)
    for tokens in PREFILLS:
        took = best(lambda n=tokens: engine.prefill(prompt(rng, n)), seconds)
        say(cell=prefill_name(tokens), value=tokens / took)
    for batch, context in DECODES:
        took_s = engine.decode_s(batch, context, seconds)
        if took_s is not None:
            say(cell=decode_name(batch, context), value=1e3 * took_s)


def since_start_s() -> float:
    """Seconds since this process was started, to a tick of the system (10 ms)."""
    started_ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
    return time.clock_gettime(time.CLOCK_BOOTTIME) - started_ticks / os.sysconf("SC_CLK_TCK")


def rss_nbytes() -> int:
    """Resident bytes of this process and all processes below it."""
    total, waiting = 0, [os.getpid()]
    while waiting:
        process = Path(f"/proc/{waiting.pop()}")
        try:
            total += int((process / "statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
            for children in process.glob("task/*/children"):
                waiting += map(int, children.read_text().split())
        except OSError:  # it has ended meanwhile
            continue
    return total


def say(**fields: object) -> None:
    """One line of what this process measured."""
    print(json.dumps(fields), flush=True)
