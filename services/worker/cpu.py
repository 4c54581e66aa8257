"""Cores and compute threads of this process. To be set before torch is imported.

Two processes whose OpenMP teams share a core are 10-50x slower than two that do not, so every
worker gets cores of its own and as many threads as cores, and idle threads do not spin.
"""

from __future__ import annotations

import os

from core.errors import ConfigError
from core.settings import Settings

SPIN_COUNT = 10_000
"""How often an idle thread of a team looks before it sleeps: waking it takes longer than a small product. Up
to 1.5x on two cores of its own (docs/performance.md); 30,000 and more hurt where others use the cores too."""


def parse_cores(text: str) -> list[int]:
    """`0,2-3` -> [0, 2, 3]. Raises ConfigError."""
    cores: list[int] = []
    try:
        for part in filter(None, (p.strip() for p in text.split(","))):
            first, _, last = part.partition("-")
            cores += range(int(first), int(last or first) + 1)
    except ValueError:
        raise ConfigError(f"--cpu-affinity {text!r} is not a list of cores such as 0,2-3") from None
    return cores


def format_cores(cores: list[int]) -> str:
    return ",".join(map(str, cores))


def split_cores(cores: list[int], num_workers: int) -> list[list[int]]:
    """Cores of each worker: even contiguous shares; with more workers than cores they take turns."""
    if num_workers > len(cores):
        return [[cores[i % len(cores)]] for i in range(num_workers)]
    base, extra = divmod(len(cores), num_workers)
    shares, at = [], 0
    for i in range(num_workers):
        width = base + (i < extra)
        shares.append(cores[at : at + width])
        at += width
    return shares


def confine(settings: Settings, rank: int = 0) -> tuple[list[int], int]:
    """Pin this process and set its OpenMP team; returns the worker's cores and this process's threads.

    Each tensor-parallel rank gets its share of the worker's cores. Raises ConfigError.
    """
    if settings.cpu_affinity:
        wanted = parse_cores(settings.cpu_affinity)
        try:
            os.sched_setaffinity(0, wanted)
        except (OSError, ValueError):
            allowed = format_cores(sorted(os.sched_getaffinity(0)))
            raise ConfigError(
                f"--cpu-affinity {settings.cpu_affinity}: this process may use only cores {allowed}"
            ) from None
    cores = sorted(os.sched_getaffinity(0))
    own = split_cores(cores, settings.tensor_parallel_size)[rank]
    if len(own) < len(cores):
        os.sched_setaffinity(0, own)
    threads = settings.cpu_threads or len(own)
    os.environ["OMP_NUM_THREADS"] = str(threads)
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    os.environ.setdefault("KMP_BLOCKTIME", "0")
    if threads > 1:
        os.environ.setdefault("GOMP_SPINCOUNT", str(SPIN_COUNT))
    return cores, threads
