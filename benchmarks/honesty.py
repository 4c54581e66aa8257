"""How far the router's predicted time to the first token is off, and which part of the estimate is to blame.

    python -m benchmarks.honesty [--requests 200] [--seed 0] [-- FLAGS]

Starts `baton serve` with one prefill and one decode worker (FLAGS may say otherwise) and sends it a mix:
short prompts, long ones, and long ones that share a prefix, 1 to 8 at a time. What was predicted and what it
took is read from `/v1/requests/{id}`; both count from the plan to the first token. The first requests, from
which the workers learn how fast they are, are left out.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import httpx
from rich.console import Console
from rich.table import Table

from benchmarks.serving import served

START_S = 300.0
WARM_UP = 24
AT_ONCE = (1, 2, 4, 8)
"""Requests at the same time, in turns of TURN requests."""
TURN = 10

SHARED_TOKENS = 256
PARTS = ("wait", "made", "transfer")


@dataclass(frozen=True, slots=True)
class Ask:
    name: str
    prompt: list[int]
    output: int


@dataclass(frozen=True, slots=True)
class Sample:
    """Milliseconds of one request. `predicted` and `real` by part: the wait in the workers' queues, with the
    way there and back; KV computed, loaded and handed over until the first token; and of that the transfer
    that computing does not hide."""

    kind: str
    predicted_ms: float
    real_ms: float
    predicted: dict[str, float]
    real: dict[str, float]

    @property
    def error(self) -> float:
        """Signed: above 0 the token came sooner than predicted."""
        return (self.predicted_ms - self.real_ms) / self.real_ms


def asks(count: int, seed: int) -> Iterator[Ask]:
    """Half short, a quarter long, a quarter long after one of two shared prefixes."""
    rng = random.Random(seed)
    prefixes = [_tokens(rng, SHARED_TOKENS) for _ in range(2)]
    for number in range(count):
        kind = rng.choice(("short", "short", "long", "shared"))
        if kind == "short":
            prompt = _tokens(rng, rng.randint(8, 60))
        elif kind == "long":
            prompt = _tokens(rng, rng.randint(150, 800))
        else:
            prompt = rng.choice(prefixes) + _tokens(rng, rng.randint(16, 200))
        yield Ask(f"honesty-{seed}-{number}", prompt, rng.randint(4, 32))


def _tokens(rng: random.Random, count: int) -> list[int]:
    return rng.choices(range(1000, 40_000), k=count)


async def measure(url: str, requests: int, seed: int) -> list[Sample]:
    wanted = list(asks(WARM_UP + requests, seed))
    async with httpx.AsyncClient(base_url=url, timeout=600) as client:
        for turn, first in enumerate(range(0, len(wanted), TURN)):
            gate = asyncio.Semaphore(AT_ONCE[turn % len(AT_ONCE)])
            await asyncio.gather(*(_send(client, gate, ask) for ask in wanted[first : first + TURN]))
        records = [(await client.get(f"/v1/requests/{ask.name}")).json() for ask in wanted[WARM_UP:]]
    return [_sample(record) for record in records]


async def _send(client: httpx.AsyncClient, gate: asyncio.Semaphore, ask: Ask) -> None:
    body = {"prompt": ask.prompt, "max_tokens": ask.output, "temperature": 0, "ignore_eos": True}
    async with gate:
        reply = await client.post("/v1/completions", json=body, headers={"X-Request-Id": ask.name})
    if reply.status_code != 200:
        raise SystemExit(f"{ask.name} was answered with {reply.status_code}: {reply.text[:200]}")


def _sample(record: dict[str, Any]) -> Sample:
    plan, times = record["plan"], record["times"]
    chosen = next(each for each in plan["candidates"] if each["chosen"])
    predicted = {
        "wait": chosen["wait_ms"],
        "made": chosen["prefill_ms"] + chosen["load_ms"] + chosen["transfer_ms"],
        "transfer": chosen["transfer_ms"],
    }
    real = {
        "wait": times["planned_ttft_ms"] - times["prefill_ms"] + times["remote_queue_ms"],
        "made": times["prefill_ms"] - times["remote_queue_ms"],
        "transfer": times["transfer_exposed_ms"],
    }
    return Sample(plan["kind"], chosen["ttft_ms"], times["planned_ttft_ms"], predicted, real)


def quantile(values: Sequence[float], share: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def tables(samples: Sequence[Sample]) -> Iterator[Table]:
    """The errors, then by part what was predicted and what it took; a row for each kind of plan, and for
    all."""
    errors = _table(
        f"first token, predicted against real, {len(samples)} requests",
        *("plan", "requests", "|error| p50", "p90", "error p50", "predicted p50 ms", "real p50 ms"),
    )
    parts = _table("medians by part, ms: predicted / real", "plan", *PARTS)
    for kind in (*sorted({each.kind for each in samples}), "all"):
        group = [each for each in samples if kind in (each.kind, "all")]
        sizes = [abs(each.error) for each in group]
        errors.add_row(
            *(kind, f"{len(group)}", f"{median(sizes):.1%}", f"{quantile(sizes, 0.9):.1%}"),
            f"{median(each.error for each in group):+.1%}",
            f"{median(each.predicted_ms for each in group):.0f}",
            f"{median(each.real_ms for each in group):.0f}",
        )
        cells = [
            f"{median(each.predicted[part] for each in group):.1f} / "
            f"{median(each.real[part] for each in group):.1f}"
            for part in PARTS
        ]
        parts.add_row(kind, *cells)
    yield errors
    yield parts


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left")
    for column in columns:
        table.add_column(column, justify="left" if column == "plan" else "right")
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--requests", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("flags", nargs="*")
    given = parser.parse_args()
    with served("--prefill=1", "--decode=1", *given.flags, deadline=time.monotonic() + START_S) as url:
        samples = asyncio.run(measure(url, given.requests, given.seed))
    for table in tables(samples):
        Console(width=120).print(table)


if __name__ == "__main__":
    main()
