"""Four workers that share one Redis, against four with a host tier each and the same bytes in all.

The working set is three times one private host tier: some prefixes of equal length, each request one of them
and some tokens of its own, at a worker drawn by chance, one request at a time. The pools hold one prompt, so
they hide nothing. Both runs serve the same requests in the same order, from empty tiers.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from statistics import mean

from rich.table import Table

from benchmarks.redis_server import HOST, port_of, start_redis
from benchmarks.workers import Answer, Session, start_workers
from core.settings import Settings

NUM_WORKERS = 4
NUM_PREFIXES = 40
OWN_TOKENS = 32
NBYTES_PER_TOKEN = {"fp32": 46_080, "bf16": 23_040}
"""KV of the embedded model."""
BLOCK_SIZE = Settings.model_fields["block_size"].default
LANDING_BLOCKS = 64
"""Slots of host RAM through which a worker's blocks go to Redis and come from there."""
VOCABULARY = range(1000, 40_000)
COLUMNS = ("tiers", "MB in all", "tokens reused %", "mean TTFT ms", "later half: %", "ms", "by source")


@dataclass(frozen=True, slots=True)
class Asked:
    worker: int
    prompt: list[int]


def draw(prefix_tokens: int, num_requests: int) -> list[Asked]:
    rng = random.Random(0)
    prefixes = [rng.choices(VOCABULARY, k=prefix_tokens) for _ in range(NUM_PREFIXES)]
    return [
        Asked(rng.randrange(NUM_WORKERS), rng.choice(prefixes) + rng.choices(VOCABULARY, k=OWN_TOKENS))
        for _ in range(num_requests)
    ]


async def compare(dtype: str, prefix_tokens: int, num_requests: int) -> Table:
    token_nbytes = NBYTES_PER_TOKEN[dtype]
    working_set = NUM_PREFIXES * prefix_tokens * token_nbytes
    private = working_set // 3
    landing = LANDING_BLOCKS * BLOCK_SIZE * token_nbytes
    redis_nbytes = NUM_WORKERS * (private - landing)
    asked = draw(prefix_tokens, num_requests)
    given = {
        "dtype": dtype,
        "num_blocks": (prefix_tokens + OWN_TOKENS) // BLOCK_SIZE + 2,
        "store_policy": "write-through",
        "log_level": "error",
    }
    prefixes = f"{NUM_PREFIXES} prefixes of {prefix_tokens} tokens, {working_set / 1e6:.0f} MB"
    title = f"{num_requests} requests at {NUM_WORKERS} workers, {prefixes}"
    table = Table(*COLUMNS, title=title)
    answers = await serve(Settings.model_validate(given | {"host_cache_bytes": private}), asked)
    table.add_row("4 x host", f"{NUM_WORKERS * private / 1e6:.0f}", *_figures(answers))
    with ExitStack() as stack:
        server = start_redis(stack, "--maxmemory", str(redis_nbytes), "--maxmemory-policy", "allkeys-lru")
        shared = {"host_cache_bytes": landing, "redis_url": f"redis://{HOST}:{port_of(server)}"}
        answers = await serve(Settings.model_validate(given | shared), asked)
    table.add_row("one Redis", f"{NUM_WORKERS * private / 1e6:.0f}", *_figures(answers))
    return table


async def serve(settings: Settings, asked: Sequence[Asked]) -> list[Answer]:
    """Every request in turn; workers that have just started, each warmed up by a prompt of its own."""
    with ExitStack() as stack:
        workers = start_workers(stack, ["decode"] * NUM_WORKERS, settings)
        sessions = [Session(worker) for worker in workers]
        rng = random.Random(1)
        for session in sessions:
            await session.run(rng.choices(VOCABULARY, k=len(asked[0].prompt)), 2)
        answers = [await sessions[each.worker].run(each.prompt, 1, salt="shared") for each in asked]
        for session in sessions:
            await session.close()
    return answers


def _figures(answers: Sequence[Answer]) -> tuple[str, ...]:
    sources: dict[str, int] = {}
    for answer in answers:
        got = answer.gathered
        for source, tokens in (
            ("device", got.cached_tokens),
            *got.tier_tokens,
            ("computed", got.computed_tokens),
        ):
            sources[source] = sources.get(source, 0) + tokens
    total = sum(sources.values())
    shares = ", ".join(f"{source} {tokens / total:.0%}" for source, tokens in sources.items())
    later = answers[len(answers) // 2 :]
    return *_means(answers), *_means(later), shares


def _means(answers: Sequence[Answer]) -> tuple[str, str]:
    reused = [answer.gathered.reused_tokens for answer in answers]
    total = sum(answer.gathered.reused_tokens + answer.gathered.computed_tokens for answer in answers)
    return f"{100 * sum(reused) / total:.0f}", f"{1e3 * mean(answer.ttft_s for answer in answers):.0f}"
