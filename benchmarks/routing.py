"""Routing by simulation, and what a plan costs the router.

    python -m benchmarks.routing [--requests 4000] [--load 0.8]      a public trace, four ways to route
    python -m benchmarks.routing --shared-prefix                    everybody has the same first 512 tokens
    python -m benchmarks.routing --plan-time [--workers 10000]      seconds of a plan while workers report

The trace is Mooncake's conversations ($BATON_SHARED/traces), lengths and 512-token blocks divided by 16;
its ticks of 3 s are spread. It is replayed at such a speed that computing every prompt whole would keep
`--load` of the workers that prefill busy. `cost` is `planning.plan` on a `Roster`, as in production, which
hears of the workers as a router does; the others choose from the same news:

    random      any worker
    load        the one with the fewest sequences
    prefix      the one that holds most of the prompt if that is half of it or more, else as `load`
"""

from __future__ import annotations

import argparse
import gzip
import json
import os
import random
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from statistics import fmean, median, quantiles

from benchmarks.routing_fleet import BLOCK_SIZE, CHUNK_TOKENS, PREFILL, Crowd
from benchmarks.routing_sim import MESSAGE_S, Asked, Clock, Worker, serve
from core.blocks import num_shareable_blocks
from core.request import Role
from planning.estimate import Targets
from planning.plan import Forced, Plan, RequestFacts, plan
from planning.worker_view import FleetView, Sent, WorkerView
from services.router.roster import Roster

SHARED, TRACE = "BATON_SHARED", "mooncake_conversation.jsonl.gz"
SCALE = 16
POOL_BLOCKS = 2000
"""Of each worker: with ten of them 10M tokens of the trace as it was."""

MIN_REMOTE_TOKENS = 64
AGGREGATED = {Role.DECODE: 10}
SPLIT = {Role.PREFILL: 6, Role.DECODE: 4}

Choice = tuple[WorkerView, WorkerView | None]
Way = Callable[[Asked, FleetView, random.Random], Choice]


def trace(requests: int, load: float, num_workers: int, rng: random.Random) -> list[Asked]:
    if SHARED not in os.environ:
        raise SystemExit(f"set {SHARED} to the folder that has traces/{TRACE}")
    path = Path(os.environ[SHARED]) / "traces" / TRACE
    with gzip.open(path, "rt") as lines:
        rows = [json.loads(line) for line, _ in zip(lines, range(requests), strict=False)]
    whole_s = sum(PREFILL.prompt_seconds(_scaled(row["input_length"]), 0, CHUNK_TOKENS) for row in rows)
    times = sorted(row["timestamp"] / 1000 + rng.random() * 3 for row in rows)
    speed = whole_s / (num_workers * load) / (times[-1] - times[0])
    return [
        Asked(
            at=(at - times[0]) * speed,
            keys=[key + 1 for key in row["hash_ids"]],
            tokens=_scaled(row["input_length"]),
            answer=_scaled(row["output_length"]),
        )
        for at, row in zip(times, rows, strict=True)
    ]


def _scaled(tokens: int) -> int:
    return max(1, tokens // SCALE)


def alike(requests: int, gap_s: float) -> list[Asked]:
    """512 tokens that all share, 40 of their own; one each `gap_s`."""
    shared = list(range(1, 512 // BLOCK_SIZE + 1))
    return [Asked(number * gap_s, [*shared, 1000 + number], 512 + 40, 16) for number in range(requests)]


def by_random(asked: Asked, view: FleetView, rng: random.Random) -> Choice:
    return _with_prefill(asked, view, rng.choice)


def by_load(asked: Asked, view: FleetView, rng: random.Random) -> Choice:
    return _with_prefill(asked, view, lambda workers: _least(workers, rng))


def by_prefix(asked: Asked, view: FleetView, rng: random.Random) -> Choice:
    def best(workers: Sequence[WorkerView]) -> WorkerView:
        hits = [sum(view.found.get(worker.incarnation, {}).values()) for worker in workers]
        if max(hits) * BLOCK_SIZE < asked.tokens / 2:
            return _least(workers, rng)
        return _least([each for each, hit in zip(workers, hits, strict=True) if hit == max(hits)], rng)

    return _with_prefill(asked, view, best)


def _least(workers: Sequence[WorkerView], rng: random.Random) -> WorkerView:
    least = min(worker.load for worker in workers)
    return rng.choice([worker for worker in workers if worker.load == least])


def _with_prefill(
    asked: Asked, view: FleetView, best: Callable[[Sequence[WorkerView]], WorkerView]
) -> Choice:
    decode = best(view.decode)
    remote = view.prefill and asked.shareable * BLOCK_SIZE >= MIN_REMOTE_TOKENS
    return decode, best(view.prefill) if remote else None


WAYS: dict[str, Way | None] = {"random": by_random, "load": by_load, "prefix": by_prefix, "cost": None}


def planned(asked: Asked, view: FleetView, rng: random.Random) -> Plan:
    return plan(
        RequestFacts(asked.tokens),
        view,
        Forced.AUTO,
        targets=Targets(),
        min_remote_tokens=MIN_REMOTE_TOKENS,
        rng=rng,
    )


def simulate(
    asked: list[Asked], roles: dict[Role, int], way: Way | None, num_routers: int = 1, seed: int = 0
) -> None:
    """Fill in what became of each request. `way`: None = the planner."""
    rng, clock = random.Random(seed), Clock()
    rosters = [Roster("t", silence_s=1e9, rng=rng) for _ in range(num_routers)]
    workers = {
        name: Worker(name, role, clock, rosters, POOL_BLOCKS)
        for role, count in roles.items()
        for name in (f"{role}-{number}" for number in range(count))
    }

    def route(each: Asked, roster: Roster) -> None:
        view = roster.fleet_view(clock.now, each.keys[: each.shareable])
        if way is None:
            made = planned(each, view, rng)
            decode, prefill, work = made.decode, made.prefill, made.work
            each.predicted_s = made.chosen.estimate.ttft_s
        else:
            decode, prefill = way(each, view, rng)
            work = {decode.incarnation: Sent(1)} | ({prefill.incarnation: Sent(1)} if prefill else {})
        roster.assigned(each.name, work)
        each.decode, each.prefill = decode.worker_id, prefill and prefill.worker_id
        helper = workers[prefill.worker_id] if prefill else None
        clock.after(MESSAGE_S, lambda: serve(clock, each, workers[decode.worker_id], helper))

    for number, each in enumerate(asked):
        roster = rosters[number % num_routers]
        each.name = str(number)
        clock.after(each.at, lambda each=each, roster=roster: route(each, roster))
    clock.run()


def share(asked: Iterable[Asked], role: Role, count: int) -> tuple[int, float]:
    """Requests that a role served, and what the busiest of its workers got as a multiple of the mean."""
    names = (each.prefill if role is Role.PREFILL else each.decode for each in asked)
    got = Counter(name for name in names if name is not None)
    return got.total(), max(got.values(), default=0) * count / max(1, got.total())


def hit_rate(asked: Sequence[Asked]) -> float:
    return sum(each.hit_tokens for each in asked) / sum(each.tokens for each in asked)


def compare(requests: int, load: float) -> None:
    print(
        f"{'fleet':<14}{'way':<8}{'mean TTFT':>10}{'p50':>9}{'p99':>9}{'hits':>8}{'of load':>9}{'error':>8}"
    )
    for label, roles in (("10 aggregated", AGGREGATED), ("6 P + 4 D", SPLIT)):
        base = 0.0
        for name, way in WAYS.items():
            asked = trace(requests, load, roles.get(Role.PREFILL, roles[Role.DECODE]), random.Random(0))
            simulate(asked, roles, way)
            times = [each.ttft_s for each in asked]
            base = fmean(times) if name == "load" else base
            error = median(abs(each.predicted_s - each.ttft_s) / each.ttft_s for each in asked)
            print(
                f"{label:<14}{name:<8}{fmean(times):>9.2f}s{median(times):>8.2f}s"
                f"{quantiles(times, n=100)[98]:>8.2f}s{hit_rate(asked):>8.1%}"
                + (f"{base / fmean(times):>8.2f}x" if base else f"{'':>9}")
                + (f"{error:>8.1%}" if way is None else "")
            )


def shares(requests: int) -> None:
    print("asked: requests that a role served; most: of its busiest worker, as a multiple of the mean")
    print(f"{'fleet':<14}{'arrivals':<12}{'routers':>8}", end="")
    print(f"{'P asked':>9}{'P most':>8}{'D asked':>9}{'D most':>8}{'hits':>8}")
    for label, roles in (("10 aggregated", AGGREGATED), ("6 P + 4 D", SPLIT)):
        for arrivals, gap_s in (("burst", 0.002), ("one by one", 5.0)):
            for num_routers in (1, 2):
                asked = alike(requests, gap_s)
                simulate(asked, roles, None, num_routers)
                print(f"{label:<14}{arrivals:<12}{num_routers:>8}", end="")
                for role in (Role.PREFILL, Role.DECODE):
                    served, most = share(asked, role, roles.get(role, 1))
                    print(f"{served:>9}{most:>8.2f}", end="")
                print(f"{hit_rate(asked):>8.1%}")


def plan_time(num_workers: int, plans: int) -> None:
    """Of view, plan and count, with 20 States between two plans; `cpu` leaves out what others do here."""
    rng = random.Random(0)
    crowd = Crowd(num_workers, 250, rng)
    wall, cpu, states = [], [], []
    for _ in range(plans):
        keys = crowd.prompt()
        tokens = len(keys) * BLOCK_SIZE + 5
        shareable = num_shareable_blocks(tokens, BLOCK_SIZE)
        began = time.perf_counter(), time.thread_time()
        now = time.monotonic()
        view = crowd.roster.fleet_view(now, keys[:shareable], tokens + 100, shareable * BLOCK_SIZE)
        made = plan(
            RequestFacts(tokens),
            view,
            Forced.AUTO,
            targets=Targets(),
            min_remote_tokens=MIN_REMOTE_TOKENS,
            rng=rng,
        )
        crowd.roster.assigned("sent", made.work)
        wall.append(time.perf_counter() - began[0])
        cpu.append(time.thread_time() - began[1])
        began_s = time.thread_time()
        crowd.go_on(20)
        states.append((time.thread_time() - began_s) / 20)
    for name, took in (("plan, wall", wall), ("plan, cpu", cpu), ("State, cpu", states)):
        cuts = quantiles(took, n=100)
        print(f"{num_workers} workers, {name}: p50 {cuts[49] * 1e3:.3f} ms, p99 {cuts[98] * 1e3:.3f} ms")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--requests", type=int, default=4000)
    parser.add_argument("--load", type=float, default=0.8)
    parser.add_argument("--shared-prefix", action="store_true")
    parser.add_argument("--plan-time", action="store_true")
    parser.add_argument("--workers", type=int, default=10_000)
    given = parser.parse_args()
    if given.plan_time:
        plan_time(given.workers, 3000)
    elif given.shared_prefix:
        shares(min(given.requests, 1000))
    else:
        compare(given.requests, given.load)


if __name__ == "__main__":
    main()
