"""What a client of the whole system sees over HTTP: output tokens per second, TTFT, ITL.

    python -m benchmarks.serve [--requests 16] [--concurrency 8] [--input 200] [--output 100] [-- FLAGS]
    python -m benchmarks.serve --url http://127.0.0.1:8000      # a server that runs already, also another one

Without `--url` it starts `baton serve` twice, with prefill and decode apart and as one aggregated worker,
each on all cores; what follows `--` goes to both. Prompts are random tokens, nothing is cached.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import time
from dataclasses import dataclass, field
from itertools import pairwise

import httpx
from rich.console import Console
from rich.table import Table

from benchmarks.serving import served

START_S = 300.0
COLUMNS = ("server", "out tok/s", "TTFT p50 ms", "p99", "ITL p50 ms", "p99", "wall s")


@dataclass
class Load:
    """`requests` prompts of `input` tokens, `concurrency` at a time; each answer has `output` tokens."""

    requests: int
    concurrency: int
    input: int
    output: int
    ttft_s: list[float] = field(default_factory=list)
    itl_s: list[float] = field(default_factory=list)
    wall_s: float = 0.0

    async def run(self, url: str) -> None:
        rng, gate = random.Random(0), asyncio.Semaphore(self.concurrency)
        prompts = [rng.choices(range(1000, 40_000), k=self.input) for _ in range(self.requests)]
        limits = httpx.Limits(max_connections=self.concurrency)
        async with httpx.AsyncClient(timeout=600, limits=limits, base_url=url) as client:
            model = (await client.get("/v1/models")).json()["data"][0]["id"]
            await self._one(client, gate, model, prompts[0][:20], record=False)
            started = time.perf_counter()
            await asyncio.gather(*(self._one(client, gate, model, prompt) for prompt in prompts))
            self.wall_s = time.perf_counter() - started

    async def _one(
        self,
        client: httpx.AsyncClient,
        gate: asyncio.Semaphore,
        model: str,
        prompt: list[int],
        record: bool = True,
    ) -> None:
        body = {"model": model, "prompt": prompt, "max_tokens": self.output, "temperature": 0}
        body |= {"ignore_eos": True, "stream": True}
        async with gate:
            started = time.perf_counter()
            async with client.stream("POST", "/v1/completions", json=body) as reply:
                lines = reply.aiter_lines()
                at = [time.perf_counter() async for line in lines if _has_tokens(line)]
        if not at:
            raise SystemExit(f"{client.base_url} answered {reply.status_code} without a token")
        if record:
            self.ttft_s.append(at[0] - started)
            self.itl_s += [later - earlier for earlier, later in pairwise(at)]

    def row(self, name: str) -> tuple[str, ...]:
        rate = self.requests * self.output / self.wall_s
        times = [_ms(self.ttft_s, 0.5), _ms(self.ttft_s, 0.99), _ms(self.itl_s, 0.5), _ms(self.itl_s, 0.99)]
        return (name, f"{rate:.1f}", *times, f"{self.wall_s:.1f}")


def _has_tokens(line: str) -> bool:
    return line.startswith("data: {") and bool(json.loads(line[6:]).get("choices"))


def _ms(values: list[float], share: float) -> str:
    ordered = sorted(values)
    return f"{1e3 * ordered[min(len(ordered) - 1, int(share * len(ordered)))]:.0f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--url", default="")
    for name, default in (("requests", 16), ("concurrency", 8), ("input", 200), ("output", 100)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("flags", nargs="*")
    given = parser.parse_args()
    title = f"{given.requests} x {given.input} in / {given.output} out, {given.concurrency} at a time"
    table = Table(*COLUMNS, title=title)

    def measure(name: str, url: str) -> None:
        load = Load(given.requests, given.concurrency, given.input, given.output)
        asyncio.run(load.run(url))
        table.add_row(*load.row(name))

    if given.url:
        measure(given.url, given.url)
    else:
        for num_prefill, name in ((1, "1 prefill + 1 decode"), (0, "1 aggregated")):
            flags, deadline = (f"--prefill={num_prefill}", "--decode=1"), time.monotonic() + START_S
            with served(*flags, *given.flags, deadline=deadline) as url:
                measure(name, url)
    Console(width=120).print(table)


if __name__ == "__main__":
    main()
