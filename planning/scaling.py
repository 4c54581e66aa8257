"""How many workers the two pools should have. Pure: what a scaler decides every `PERIOD_S` seconds.

    prefill  seconds of prompts to compute --.
             TTFT p90 / target --------------|-- the most of these --> more: at once, at most twice as many
    decode   KV usage, sequences ------------|                    `--> fewer: one in SHRINK_EVERY_S, and none
             ITL p90 / target ---------------'                         that was wanted in the last WINDOW_S

Two hosts: an actor that calls `scaling`, and Kubernetes' autoscaler, whose own arithmetic this is; the
manifests in deploy/k8s/overlays hold the same numbers, and a test compares them. What a pool has of a signal
is divided by what one worker may have of it; a ratio of latency to target multiplies the workers that are
ready, since those made it. Where the signals are not to be had, nothing is to be decided.

No growth is ever held back. A pool that grew keeps its size for WINDOW_S, so any 20 minutes see at most two
reversals, fewer after more and more after fewer: one in ten.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import ceil, inf

BACKLOG_S = 2.0
"""Seconds of prompts that may wait at one prefill worker."""

KV_USAGE = 0.75
"""Of a decode worker's pool: what runs grows, and without room the youngest sequence is preempted."""

SEAT_SHARE = 0.75
"""Of a decode worker's `--max-num-seqs`."""

PRESSURE = 1.0
"""The 90th percentile of what was measured / its target, over the last PRESSURE_S."""

PRESSURE_S = 120.0

PERIOD_S = 15.0
"""A pool at most doubles in this time."""

TOLERANCE = 0.1
"""By which a ratio may differ from 1 before anything is done about it."""

SHRINK_EVERY_S = 300.0
WINDOW_S = 1200.0


@dataclass(frozen=True, slots=True)
class PrefillLoad:
    """Of all ready prefill workers together. `backlog_s`: the sum of `baton_prefill_backlog_seconds`.
    `ttft_pressure`: 0 where no request had a target."""

    backlog_s: float
    ttft_pressure: float = 0.0


@dataclass(frozen=True, slots=True)
class DecodeLoad:
    """Of all ready decode workers together. `kv_usage`: the sum of each one's share in use, 0-1. `sequences`:
    running and waiting. `seats`: of one worker. `itl_pressure`: 0 where no request had a target."""

    kv_usage: float
    sequences: float
    seats: int
    itl_pressure: float = 0.0


Load = PrefillLoad | DecodeLoad


@dataclass(frozen=True, slots=True)
class Pool:
    """Workers that are asked for, those of them that are ready, and the fewest and most there may be."""

    replicas: int
    ready: int
    least: int
    most: int


@dataclass(frozen=True, slots=True)
class Past:
    """What a scaler remembers of a pool: when it wanted how many, oldest first, and when it last changed
    their number. A new one shrinks nothing for WINDOW_S."""

    wanted: tuple[tuple[float, int], ...] = ()
    grown_at: float = -inf
    shrunk_at: float = -inf


@dataclass(frozen=True, slots=True)
class Worker:
    """One that may have to leave; `load`: seconds of prompts, or sequences."""

    worker_id: str
    ready: bool
    load: float


def scaling(load: Load, pool: Pool, past: Past, now: float) -> tuple[int, Past]:
    """The replicas to ask for, and what to pass the next time. `now`: seconds of a clock that never jumps."""
    want = wanted(load, pool)
    past = Past(_recent((*past.wanted, (now, want)), now), past.grown_at, past.shrunk_at)
    if want > pool.replicas:
        if now - past.grown_at < PERIOD_S:
            return _bounded(pool.replicas, pool), past
        more = min(want, max(1, 2 * pool.replicas))
        return _bounded(more, pool), Past(past.wanted, now, past.shrunk_at)
    if _may_shrink(pool, past, now):
        return pool.replicas - 1, Past(past.wanted, past.grown_at, now)
    return _bounded(pool.replicas, pool), past


def wanted(load: Load, pool: Pool) -> int:
    """The workers that this load is right for, within the pool's bounds."""
    match load:
        case PrefillLoad():
            workers, pressure = [load.backlog_s / BACKLOG_S], load.ttft_pressure
        case DecodeLoad():
            workers = [load.kv_usage / KV_USAGE, load.sequences / (SEAT_SHARE * load.seats)]
            pressure = load.itl_pressure
    ratio = pressure / PRESSURE
    by_share = (_rounded(each, each / max(1, pool.replicas), pool) for each in workers)
    return _bounded(max(*by_share, _rounded(ratio * pool.ready, ratio, pool)), pool)


def leaving(workers: Iterable[Worker], count: int) -> list[str]:
    """Ids of the `count` workers whose leaving costs least: those not ready, then the least loaded."""
    ranked = sorted(workers, key=lambda worker: (worker.ready, worker.load, worker.worker_id))
    return [worker.worker_id for worker in ranked[:count]]


def _rounded(workers: float, ratio: float, pool: Pool) -> int:
    return pool.replicas if abs(ratio - 1) <= TOLERANCE else ceil(workers)


def _bounded(workers: int, pool: Pool) -> int:
    return min(max(workers, pool.least), pool.most)


def _may_shrink(pool: Pool, past: Past, now: float) -> bool:
    return (
        pool.replicas > pool.least
        and past.wanted[0][0] <= now - WINDOW_S
        and max(want for _, want in past.wanted) < pool.replicas
        and now - past.shrunk_at >= SHRINK_EVERY_S
        and now - past.grown_at >= WINDOW_S
    )


def _recent(wanted: Sequence[tuple[float, int]], now: float) -> tuple[tuple[float, int], ...]:
    """Those of the window, and the last one before it, which says that the window has been seen whole."""
    before = sum(at <= now - WINDOW_S for at, _ in wanted)
    return tuple(wanted[max(0, before - 1) :])
