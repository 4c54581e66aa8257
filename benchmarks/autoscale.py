"""The scaling policy against others, by simulation over public traces.

    python -m benchmarks.autoscale [--minutes 60]

Azure's code (bursts of prompts, short answers) and conversation traces of 2023, an hour each, in
$BATON_SHARED/traces, as they were: no length or time is changed. `day` is the conversations six times on end,
of which a share is kept that rises from a tenth to all and falls again. Who decides the pools' sizes:

    static peak   what the busiest minute fills, rounded up
    static mean   what the mean minute fills, rounded up
    CPU-style     Kubernetes' autoscaler as it comes, at 70% of busy time: prefill and decode by the same rule
    baton         planning.scaling

All that change start from the static mean. `attained`: requests that kept both targets. Cost is the hours of
workers that start, serve or drain. A reversal is a growth after a shrinking, or the other way round; `in 10
min` the most of them in any ten minutes of one pool.
"""

from __future__ import annotations

import argparse
import csv
import gzip
import math
import os
import random
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from statistics import fmean

from benchmarks.autoscale_sim import TTFT_S, Asked, Nodes, Replay, Scaler, Seen, Sizes, minutes
from planning.scaling import PERIOD_S, Load, Past, Pool, scaling

SHARED = "BATON_SHARED"
CODE, CONV, DAY = "azure2023_code", "azure2023_conv", "day"
DAY_REPEATS = 6
BOUNDS = ((1, 8), (2, 16))
"""Fewest and most of prefill and decode, as in deploy/k8s/overlays/keda."""

CPU_TARGET, CPU_WINDOW_S = 0.7, 300.0


def trace(name: str, limit_s: float) -> list[Asked]:
    path = Path(os.environ[SHARED]) / "traces" / f"{name}.csv.gz"
    with gzip.open(path, "rt") as lines:
        rows = list(csv.DictReader(lines))
    times = [datetime.fromisoformat(row["TIMESTAMP"][:26]).timestamp() for row in rows]
    asked = [
        Asked(at - times[0], int(row["ContextTokens"]), max(1, int(row["GeneratedTokens"])))
        for at, row in zip(times, rows, strict=True)
    ]
    return [each for each in asked if each.at <= limit_s]


def day(limit_s: float) -> list[Asked]:
    once, rng = trace(CONV, limit_s), random.Random(0)
    span = once[-1].at + 1
    whole = [replace(each, at=each.at + turn * span) for turn in range(DAY_REPEATS) for each in once]
    length = DAY_REPEATS * span
    return [each for each in whole if rng.random() < 0.55 - 0.45 * math.cos(2 * math.pi * each.at / length)]


def bounded(sizes: Sizes) -> Sizes:
    (least_p, most_p), (least_d, most_d) = BOUNDS
    return min(max(sizes[0], least_p), most_p), min(max(sizes[1], least_d), most_d)


def baton() -> Scaler:
    pasts = [Past(), Past()]

    def decide(seen: Seen, sizes: Sizes, now: float) -> Sizes:
        loads: tuple[Load, Load] = (seen.prefill, seen.decode)
        new = list(sizes)
        for role, ready in enumerate((seen.prefill_ready, seen.decode_ready)):
            pool = Pool(sizes[role], ready, *BOUNDS[role])
            new[role], pasts[role] = scaling(loads[role], pool, pasts[role], now)
        return new[0], new[1]

    return decide


def cpu_style() -> Scaler:
    """Kubernetes' defaults: up to twice as many or four more in 15 s, down to the most of the last 300 s."""
    wanted: list[deque[int]] = [deque(maxlen=round(CPU_WINDOW_S / PERIOD_S)) for _ in range(2)]

    def decide(seen: Seen, sizes: Sizes, now: float) -> Sizes:
        wants = []
        for role, (ready, busy) in enumerate(
            ((seen.prefill_ready, seen.prefill_busy), (seen.decode_ready, seen.decode_busy))
        ):
            ratio = busy / CPU_TARGET
            wants.append(sizes[role] if abs(ratio - 1) <= 0.1 else math.ceil(ready * ratio))
            wants[role] = min(wants[role], max(2 * sizes[role], sizes[role] + 4))
        wants = list(bounded((wants[0], wants[1])))
        for role, want in enumerate(wants):
            wanted[role].append(want)
            if want < sizes[role]:
                wants[role] = min(sizes[role], max(wanted[role]))
        return wants[0], wants[1]

    return decide


def static(seen: Seen, sizes: Sizes, now: float) -> Sizes:
    return sizes


def most_in_ten_minutes(nodes: Nodes) -> int:
    times = nodes.reversals()
    return max((sum(at <= other < at + 600 for other in times) for at in times), default=0)


def row(asked: Sequence[Asked], replay: Replay) -> Iterator[str]:
    yield f"{fmean(each.kept for each in asked):.1%}"
    ranked = sorted(each.ttft_s for each in asked)
    yield f"{ranked[math.ceil(0.9 * len(ranked)) - 1] / TTFT_S:.2f}"
    pools = (replay.prefill, replay.decode)
    hours = [nodes.node_s / 3600 for nodes in pools]
    yield f"{hours[0]:.1f} + {hours[1]:.1f}"
    yield f"{sum(hours):.1f}"
    yield " + ".join(str(len(nodes.reversals())) for nodes in pools)
    yield str(max(map(most_in_ten_minutes, pools)))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=60.0, help="of each trace")
    args = parser.parse_args()
    if SHARED not in os.environ:
        raise SystemExit(f"SKIPPED: set {SHARED} to the folder that has traces/{CODE}.csv.gz")
    print("| trace | policy | P, D at first | attained | TTFT p90 / target | hours P + D | in all "
          "| reversals P + D | in 10 min |\n|---|---|---|--:|--:|--:|--:|--:|--:|")  # fmt: skip
    limit_s = 60 * args.minutes
    sources: dict[str, Callable[[], list[Asked]]] = {
        CODE: lambda: trace(CODE, limit_s),
        CONV: lambda: trace(CONV, limit_s),
        DAY: lambda: day(limit_s),
    }
    for name, requests in sources.items():
        prefill, decode = zip(*minutes(requests()), strict=True)
        peak = bounded((math.ceil(max(prefill)), math.ceil(max(decode))))
        mean = bounded((math.ceil(fmean(prefill)), math.ceil(fmean(decode))))
        ways = (("static peak", peak, static), ("static mean", mean, static))
        for policy, sizes, scaler in (*ways, ("CPU-style", mean, cpu_style()), ("baton", mean, baton())):
            asked = requests()
            replay = Replay(asked, sizes, scaler)
            replay.run()
            cells = (name, policy, f"{sizes[0]}, {sizes[1]}", *row(asked, replay))
            print("| " + " | ".join(cells) + " |", flush=True)


if __name__ == "__main__":
    main()
