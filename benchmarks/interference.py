"""What long prompts do to streams that run: prefill and decode apart, against aggregated workers.

    python -m benchmarks.interference [--every 8] [--long 4] [--itl-slo-ms 150] [-- FLAGS]

Starts `baton serve` in one layout after the other, each on all cores: one prefill and one decode worker; two
aggregated workers with half of the cores each; one aggregated worker with all of them. Streams of random
prompts decode from before the first long prompt comes until the last one has its first token. `--itl-slo-ms`
measures the aggregated layouts again with that target. What follows `--` goes to every server.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import httpx
from rich.console import Console
from rich.table import Table

from benchmarks.serving import served

START_S = 300.0
SETTLE_S = 3.0
"""From the streams' first tokens to the first long prompt."""

STREAM_TOKENS = 6000
"""At most: streams are cut off when the last long prompt has its answer."""

LAYOUTS = (
    ("1 prefill + 1 decode", ("--prefill=1", "--decode=1")),
    ("2 aggregated, half the cores each", ("--prefill=0", "--decode=2")),
    ("1 aggregated, all cores", ("--prefill=0", "--decode=1")),
)
COLUMNS = ("ITL p50 ms", "p99", "p99 / p50", "max", "long TTFT p50 ms", "max", "tok/s")


@dataclass
class Interference:
    """`streams` decode prompts of `short_tokens`, while `long` prompts of `long_tokens` come, one every
    `every_s`."""

    streams: int
    short_tokens: int
    long: int
    long_tokens: int
    every_s: float
    rng: random.Random = field(default_factory=lambda: random.Random(0))
    at: list[list[float]] = field(default_factory=list)
    ttft_s: list[float] = field(default_factory=list)

    async def run(self, url: str) -> None:
        limits = httpx.Limits(max_connections=self.streams + self.long)
        async with httpx.AsyncClient(base_url=url, timeout=600, limits=limits) as client:
            await asyncio.gather(*(self._times(client, self.long_tokens, 8, []) for _ in range(2)))  # warm
            self.at = [[] for _ in range(self.streams)]
            running = [
                asyncio.create_task(self._times(client, self.short_tokens, STREAM_TOKENS, at))
                for at in self.at
            ]
            while not all(self.at):
                await asyncio.sleep(0.05)
                if any(task.done() for task in running):
                    await asyncio.gather(*running)
            await asyncio.sleep(SETTLE_S)
            self.ttft_s = await self._send_longs(client)
            for task in running:
                task.cancel()
            ends = await asyncio.gather(*running, return_exceptions=True)
        if not all(isinstance(end, asyncio.CancelledError) for end in ends):
            raise SystemExit(f"a stream ended before the last long prompt: {ends}")

    async def _send_longs(self, client: httpx.AsyncClient) -> list[float]:
        sent = []
        for _ in range(self.long):
            sent.append(asyncio.create_task(self._first(client)))
            await asyncio.sleep(self.every_s)
        return await asyncio.gather(*sent)

    async def _first(self, client: httpx.AsyncClient) -> float:
        began, at = time.perf_counter(), []
        await self._times(client, self.long_tokens, 2, at)
        return at[0] - began

    async def _times(self, client: httpx.AsyncClient, num_tokens: int, output: int, at: list[float]) -> None:
        """Append the time of each token of an answer."""
        prompt = self.rng.choices(range(1000, 40_000), k=num_tokens)
        body: dict[str, Any] = {"prompt": prompt, "max_tokens": output, "temperature": 0}
        body |= {"ignore_eos": True, "stream": True, "return_token_ids": True}
        async with client.stream("POST", "/v1/completions", json=body) as reply:
            if reply.status_code != 200:
                raise SystemExit(f"the server answered {reply.status_code}: {await reply.aread()}")
            async for line in reply.aiter_lines():
                now = time.perf_counter()
                if line.startswith("data: {"):
                    at += [now] * sum(len(c.get("token_ids", ())) for c in json.loads(line[6:])["choices"])

    def row(self, name: str) -> tuple[str, ...]:
        gaps = [later - earlier for at in self.at for earlier, later in pairwise(at)]
        p50, p99 = _quantile(gaps, 0.5), _quantile(gaps, 0.99)
        rate = sum((len(at) - 1) / (at[-1] - at[0]) for at in self.at)
        return (
            *(name, f"{1e3 * p50:.0f}", f"{1e3 * p99:.0f}", f"{p99 / p50:.2f}", f"{1e3 * max(gaps):.0f}"),
            *(f"{1e3 * _quantile(self.ttft_s, 0.5):.0f}", f"{1e3 * max(self.ttft_s):.0f}", f"{rate:.1f}"),
        )


def _quantile(values: Sequence[float], share: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    for name, default in (("streams", 4), ("short-tokens", 100), ("long", 4), ("long-tokens", 1500)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--every", type=float, default=8.0)
    parser.add_argument("--itl-slo-ms", type=float, default=0.0)
    parser.add_argument("flags", nargs="*")
    given = parser.parse_args()
    layouts = list(LAYOUTS)
    if given.itl_slo_ms:
        target = f"--itl-slo-ms={given.itl_slo_ms:g}"
        layouts += [(f"{name}, ITL {given.itl_slo_ms:g} ms", (*flags, target)) for name, flags in LAYOUTS[1:]]
    title = f"{given.streams} streams, {given.long} x {given.long_tokens} tokens, one every {given.every:g} s"
    table = Table("layout", *COLUMNS, title=title)
    for name, flags in layouts:
        load = Interference(given.streams, given.short_tokens, given.long, given.long_tokens, given.every)
        with served(*flags, *given.flags, deadline=time.monotonic() + START_S) as url:
            asyncio.run(load.run(url))
        table.add_row(*load.row(name))
    Console(width=130).print(table)


if __name__ == "__main__":
    main()
