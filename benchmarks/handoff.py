"""What the handoff costs: bytes, time, the part hidden behind prefill, and how soon token 1 follows.

    python -m benchmarks.handoff [--transports shm,nixl] [--lengths 128,512,2048,4000] [--repeat 3]

Each prompt runs twice in turn on the same two workers, once prefilled by P and pulled by D, once
prefilled by D itself; medians over the repetitions. `exposed` is the time from P's commit of the last
block until all blocks stand verified in D; `added` is its share of the time to first token; `steps` is
the time from P's last commit to token 1 in ordinary decode steps of D (that includes computing the
prompt's short rest).
"""

from __future__ import annotations

import argparse
import asyncio
import random
from contextlib import ExitStack
from statistics import median

from rich.console import Console
from rich.table import Table

from benchmarks.workers import Answer, Session, start_workers, target_of
from core.settings import Settings

COLUMNS = (
    "transport", "tokens", "MB", "transfer ms", "GB/s", "hidden %", "exposed ms", "added %", "token 1, steps",
    "TTFT P/D s", "TTFT local s", "ratio",
)  # fmt: skip
VOCABULARY = range(1000, 40_000)


async def measure(transport: str, lengths: list[int], repeat: int, dtype: str) -> list[tuple[str, ...]]:
    settings = Settings.model_validate({"transport": transport, "dtype": dtype, "log_level": "warning"})
    rows, rng = [], random.Random(0)
    with ExitStack() as stack:
        prefill, decode = start_workers(stack, ["prefill", "decode"], settings)
        target, session = await target_of(prefill), Session(decode)
        for _ in range(2):  # connections, first pages
            await session.run(rng.choices(VOCABULARY, k=200), 8, target)
        for length in lengths:
            apart, local = [], []
            for _ in range(repeat):
                prompt = rng.choices(VOCABULARY, k=length)
                apart.append(await session.run(prompt, 8, target))
                local.append(await session.run(prompt, 8))
            rows.append(_row(transport, length, apart, local))
        await session.close()
    return rows


def _row(transport: str, length: int, apart: list[Answer], local: list[Answer]) -> tuple[str, ...]:
    for ours, theirs in zip(apart, local, strict=True):
        if ours.gathered.source_error or ours.token_ids != theirs.token_ids:
            raise SystemExit(f"the handoff did not work: {ours.gathered.source_error or 'other tokens'}")
    g = [a.gathered for a in apart]
    nbytes = g[0].transfer_nbytes
    transfer = median(x.transfer_s for x in g)
    exposed = median(x.transfer_exposed_s for x in g)
    ttft, alone = median(a.ttft_s for a in apart), median(a.ttft_s for a in local)
    itl = median(gap for a in [*apart, *local] for gap in a.itl_s)
    steps = median(x.last_block_to_token_s for x in g) / itl
    hidden = 100 * (1 - min(1.0, exposed / transfer)) if transfer else 0.0
    return (
        transport, str(length), f"{nbytes / 1e6:.1f}", f"{transfer * 1e3:.1f}",
        f"{nbytes / transfer / 1e9:.1f}" if transfer else "-", f"{hidden:.0f}", f"{exposed * 1e3:.1f}",
        f"{100 * exposed / ttft:.2f}", f"{steps:.1f}", f"{ttft:.2f}", f"{alone:.2f}", f"{ttft / alone:.3f}",
    )  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--transports", default="shm,nixl")
    parser.add_argument("--lengths", default="128,512,2048,4000")
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--dtype", default="fp32")
    given = parser.parse_args()
    table = Table(*COLUMNS, title=f"handoff, {given.dtype} KV, one core a worker")
    for transport in given.transports.split(","):
        lengths = [int(n) for n in given.lengths.split(",")]
        for row in asyncio.run(measure(transport, lengths, given.repeat, given.dtype)):
            table.add_row(*row)
    Console(width=140).print(table)


if __name__ == "__main__":
    main()
