"""What a prefix is worth that a tier holds: TTFT from each tier, its bandwidth, and a tier that is slow.

    python -m benchmarks.tiers [--tokens 2048] [--repeat 3] [--dtype fp32] [--directory DIR]
    python -m benchmarks.tiers --shared [--prefix 512] [--requests 240]

One worker on one core, the client and Redis on the others. Its pool has room for one prompt, so each prompt
pushes the one before it out; for disk and Redis the worker is a new process that never saw the prompts.
Each hit has a cold prompt of equal length beside it; medians over the repetitions, and the first hit of the
worker's life. `in the tier` is bytes over the time in which the tier was busy, `to the pool` over the time by
which its hit is later than one out of the pool itself: a difference of two steps, so rough where little is
left. Raw limits are measured on the worker's core before and after each hit, once each: a disk that was idle
gives a burst of twice its bandwidth to whoever comes first.

The slow tier is the same Redis behind a wire of a tenth and of a hundredth of its raw bandwidth. Two workers
that have just started, one with it and one without any tier, answer in turns.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

import redis
from rich.console import Console
from rich.table import Table

from benchmarks.raw_limits import direct_reads, memcpy, on_cores, redis_gets
from benchmarks.redis_server import HOST, port_of, start_redis, throttled
from benchmarks.tiers_shared import compare
from benchmarks.workers import Answer, Session, start_workers
from core.settings import Settings
from kvtransfer.payload import HEADER_NBYTES
from services.children import Child

VOCABULARY = range(1000, 40_000)
BLOCK_SIZE = Settings.model_fields["block_size"].default
HOST_NBYTES_PER_TOKEN = 4 * 46_080
"""Room for four prompts of the embedded model in fp32."""
STORED_S = 60.0
SLOW = (10, 100)
TTFT_COLUMNS = ("source", "first ms", "hit ms", "cold ms", "ratio", "goal", "over the pool's ms")
BANDWIDTH_COLUMNS = ("source", "MB", "in the tier GB/s", "to the pool GB/s", "raw GB/s", "tier %", "pool %")
SLOW_COLUMNS = ("bandwidth", "request", "TTFT s", "cold s", "ratio", "tokens from it", "chosen")
GOALS = {"host": 0.03, "disk": 0.06, "redis": 0.08}


@dataclass
class Hits:
    """Of one source. `tier` and `raw`: bytes/s; empty for the pool."""

    cold: list[Answer] = field(default_factory=list)
    hit: list[Answer] = field(default_factory=list)
    tier: list[float] = field(default_factory=list)
    raw: list[float] = field(default_factory=list)

    @property
    def ttft_s(self) -> float:
        return median(answer.ttft_s for answer in self.hit)


class Bench:
    """Prompts of `tokens` tokens on one worker at a time."""

    def __init__(
        self, tokens: int, repeat: int, dtype: str, directory: Path, server: redis.Redis, core: int
    ) -> None:
        self.repeat, self._dtype, self._tokens = repeat, dtype, tokens
        self._directory, self._server = directory, server
        self._rng = random.Random(0)
        self._core = [core]
        self.kept = [self.prompt() for _ in range(repeat + 1)]
        """The prompts that disk and Redis hold, after `fill`."""
        self.block_nbytes = 0

    @property
    def shareable(self) -> int:
        """Tokens of a prompt that can come from a tier."""
        return (self._tokens - 1) // BLOCK_SIZE * BLOCK_SIZE

    @property
    def nbytes(self) -> int:
        """Bytes of one prompt's KV that can come from a tier."""
        return self.shareable // BLOCK_SIZE * self.block_nbytes

    async def fill(self) -> None:
        """Compute the prompts that are kept, and wait until disk and Redis hold them."""
        with ExitStack() as stack:
            worker, session = self.start(stack, self.disk | self.redis() | {"store_policy": "write-through"})
            self.block_nbytes = worker.body["footprint"]["bytes_per_token"] * BLOCK_SIZE  # pyright: ignore
            for i, prompt in enumerate(self.kept):
                self._expect(await self.ask(session, prompt), "computed")
                deadline = time.monotonic() + STORED_S
                while not await self._stored(worker, (i + 1) * self.nbytes):
                    if time.monotonic() > deadline:
                        raise SystemExit(f"disk or Redis did not store a prompt: {worker.probe()['tiers']}")
                    await self.ask(session, prompt)  # what a full queue dropped is offered anew
            await session.close()

    async def _stored(self, worker: Child, nbytes: int) -> bool:
        for _ in range(100):
            if all(_stats(worker, tier)["store_nbytes"] >= nbytes for tier in ("disk", "redis")):
                return True
            await asyncio.sleep(0.05)
        return False

    async def device_and_host(self) -> dict[str, Hits]:
        """A prompt twice in turn is a hit of the pool; the one before the last is one of the host tier."""
        device, host = Hits(), Hits()
        with ExitStack() as stack:
            worker, session = self.start(stack, {})
            await self.warm_up(session)
            last = self.prompt()
            await self.ask(session, last)
            for _ in range(self.repeat + 1):
                prompt = self.prompt()
                cold = self._expect(await self.ask(session, prompt), "computed")
                host.hit.append(await self._measured(worker, session, last, "host", host))
                device.hit.append(self._expect(await self.ask(session, last), "device"))
                device.cold.append(cold)
                host.cold.append(cold)
                last = prompt
            await session.close()
        return {"device": device, "host": host}

    async def below(self, tier: str) -> Hits:
        """What `fill` left in the tier, each prompt once, by a process that knows none of them."""
        hits = Hits()
        with ExitStack() as stack:
            worker, session = self.start(stack, self.disk if tier == "disk" else self.redis())
            await self.warm_up(session)
            for prompt in self.kept:
                hits.cold.append(self._expect(await self.ask(session, self.prompt()), "computed"))
                hits.hit.append(await self._measured(worker, session, prompt, tier, hits))
            await session.close()
        return hits

    async def _measured(
        self, worker: Child, session: Session, prompt: Sequence[int], tier: str, hits: Hits
    ) -> Answer:
        """A hit of the tier, its bandwidth, and the raw one before and after it."""
        hits.raw.append(self._raw(tier))
        before = _stats(worker, tier)
        answer = self._expect(await self.ask(session, prompt), tier)
        hits.tier.append(_rate(before, _stats(worker, tier)))
        hits.raw.append(self._raw(tier))
        return answer

    async def slowed(self, nbytes_per_s: float) -> list[tuple[Answer, Answer]]:
        """(with a Redis that has this bandwidth and all prompts, without any tier), from the first on."""
        pairs = []
        async with throttled(port_of(self._server), nbytes_per_s) as port:
            with ExitStack() as stack:
                _, with_tier = self.start(stack, self.redis(port))
                _, without = self.start(stack, {"host_cache_bytes": 0})
                for prompt in self.kept:
                    slow, cold = await self.ask(with_tier, prompt), await self.ask(without, self.prompt())
                    pairs.append((slow, self._expect(cold, "computed")))
                await with_tier.close()
                await without.close()
        return pairs

    def _raw(self, tier: str) -> float:
        """What the worker's core can get of one prompt's bytes without a tier, bytes/s."""
        count = self.nbytes // self.block_nbytes
        with on_cores(self._core):
            if tier == "host":
                return memcpy(count, self.block_nbytes)
            if tier == "disk":
                return direct_reads(sorted(self._directory.rglob("*.kv"))[:count])
            keys = sorted(self._server.scan_iter(count=1000))[:count]
            address = (HOST, port_of(self._server))
            return redis_gets(address, keys, HEADER_NBYTES + self.block_nbytes)

    def start(self, stack: ExitStack, tiers: dict[str, object]) -> tuple[Child, Session]:
        given: dict[str, object] = {
            "dtype": self._dtype,
            "num_blocks": -(-self._tokens // BLOCK_SIZE) + 1,
            "host_cache_bytes": self._tokens * HOST_NBYTES_PER_TOKEN,
            "log_level": "error",
        }
        settings = Settings.model_validate(given | tiers)
        worker = start_workers(stack, ["decode"], settings, self._core)[0]
        return worker, Session(worker)

    @property
    def disk(self) -> dict[str, object]:
        return {"disk_cache_dir": str(self._directory)}

    def redis(self, port: int = 0) -> dict[str, object]:
        return {"redis_url": f"redis://{HOST}:{port or port_of(self._server)}"}

    def prompt(self) -> list[int]:
        return self._rng.choices(VOCABULARY, k=self._tokens)

    async def ask(self, session: Session, prompt: Sequence[int]) -> Answer:
        """The second token's KV takes the last block of the pool: nothing of other prompts stays there."""
        return await session.run(prompt, 2, salt="kept")

    async def warm_up(self, session: Session) -> None:
        await session.run(self._rng.choices(VOCABULARY, k=300), 4)

    def _expect(self, answer: Answer, source: str) -> Answer:
        """Exits with a sentence when the prompt's KV came from elsewhere."""
        got = answer.gathered
        came = {"device": got.cached_tokens, **dict(got.tier_tokens), "computed": got.computed_tokens}
        shareable = 0 if source == "computed" else self.shareable
        wanted = {"computed": self._tokens - shareable} | ({source: shareable} if shareable else {})
        if {name: tokens for name, tokens in came.items() if tokens} != wanted:
            raise SystemExit(
                f"{wanted} was to be measured and {came} came; planned: {got.source_plan or '-'}"
            )
        return answer


def _stats(worker: Child, tier: str) -> dict[str, float]:
    return worker.probe()["tiers"][tier]  # pyright: ignore


def _rate(before: dict[str, float], after: dict[str, float]) -> float:
    return (after["load_nbytes"] - before["load_nbytes"]) / (after["load_s"] - before["load_s"])


def ttft_table(found: dict[str, Hits], title: str) -> Table:
    table = Table(*TTFT_COLUMNS, title=title)
    for source, hits in found.items():
        ratio = median(hit.ttft_s / cold.ttft_s for hit, cold in zip(hits.hit, hits.cold, strict=True))
        cold_ms = 1e3 * median(cold.ttft_s for cold in hits.cold)
        goal = f"{GOALS[source]:.2f}" if source in GOALS else ""
        first_ms, hit_ms = 1e3 * hits.hit[0].ttft_s, 1e3 * hits.ttft_s
        figures = [f"{ms:.0f}" for ms in (first_ms, hit_ms, cold_ms)]
        over_ms = 1e3 * (hits.ttft_s - found["device"].ttft_s)
        table.add_row(source, *figures, f"{ratio:.3f}", goal, f"{over_ms:.0f}")
    return table


def bandwidth_table(found: dict[str, Hits], nbytes: int) -> Table:
    table = Table(*BANDWIDTH_COLUMNS, title="bandwidth; goal: 70% of the raw limit")
    for source, hits in found.items():
        if source == "device":
            continue
        raw, in_tier = median(hits.raw), median(hits.tier)
        to_pool = nbytes / max(1e-3, hits.ttft_s - found["device"].ttft_s)  # a noisy machine can invert them
        figures = [f"{rate / 1e9:.2f}" for rate in (in_tier, to_pool, raw)]
        table.add_row(source, f"{nbytes / 1e6:.0f}", *figures, f"{in_tier / raw:.0%}", f"{to_pool / raw:.0%}")
    return table


async def slow_table(bench: Bench, raw_nbytes_per_s: float) -> Table:
    table = Table(*SLOW_COLUMNS, title="a slow Redis against none; goal: at most 1.05")
    for factor in SLOW:
        rate = raw_nbytes_per_s / factor
        for i, (slow, cold) in enumerate(await bench.slowed(rate), 1):
            tokens = dict(slow.gathered.tier_tokens).get("redis", 0)
            times = [f"{slow.ttft_s:.2f}", f"{cold.ttft_s:.2f}", f"{slow.ttft_s / cold.ttft_s:.2f}"]
            plan = slow.gathered.source_plan.split(";")[0]
            table.add_row(f"1/{factor}: {rate / 1e6:.0f} MB/s", str(i), *times, str(tokens), plan)
    return table


async def measure(bench: Bench, show: Callable[[Table], None], title: str) -> None:
    await bench.fill()
    found = await bench.device_and_host()
    for tier in ("disk", "redis"):
        found[tier] = await bench.below(tier)
    show(ttft_table(found, title))
    show(bandwidth_table(found, bench.nbytes))
    show(await slow_table(bench, median(found["redis"].raw)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--dtype", default="fp32")
    parser.add_argument(
        "--directory", help="where the disk tier is measured; default: the temporary directory"
    )
    parser.add_argument("--shared", action="store_true", help="one Redis against four private host tiers")
    parser.add_argument("--prefix", type=int, default=512, help="tokens of a shared prefix")
    parser.add_argument("--requests", type=int, default=240)
    given = parser.parse_args()
    console = Console(width=140)
    if given.shared:
        console.print(asyncio.run(compare(given.dtype, given.prefix, given.requests)))
        return
    *others, core = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, others or [core])
    with tempfile.TemporaryDirectory(dir=given.directory) as name, ExitStack() as stack:
        server = start_redis(stack)
        bench = Bench(given.tokens, given.repeat, given.dtype, Path(name), server, core)
        title = f"TTFT of {given.tokens} tokens, {given.dtype} KV, one worker on one core"
        asyncio.run(measure(bench, console.print, title))


if __name__ == "__main__":
    main()
