"""Cores of workers."""

from __future__ import annotations

import subprocess
import sys

import pytest

from core.errors import ConfigError
from services.worker.cpu import parse_cores, split_cores


@pytest.mark.parametrize(
    ("text", "cores"), [("", []), ("3", [3]), ("0,2-4", [0, 2, 3, 4]), (" 1 , 2 ", [1, 2])]
)
def test_lists_of_cores(text: str, cores: list[int]) -> None:
    assert parse_cores(text) == cores


def test_a_bad_list_is_refused() -> None:
    with pytest.raises(ConfigError, match="0,2-3"):
        parse_cores("0-x")


@pytest.mark.parametrize(
    ("cores", "workers", "shares"),
    [
        ([0, 1], 2, [[0], [1]]),
        ([0, 1, 2, 3, 4], 2, [[0, 1, 2], [3, 4]]),
        ([5, 7], 1, [[5, 7]]),
        ([0, 1], 3, [[0], [1], [0]]),
    ],
)
def test_every_worker_has_cores_of_its_own(cores: list[int], workers: int, shares: list[list[int]]) -> None:
    assert split_cores(cores, workers) == shares


@pytest.mark.parametrize(("degree", "rank", "own"), [(1, 0, [0, 1]), (2, 1, [1]), (3, 2, [0])])
def test_every_rank_has_its_share_of_the_cores(degree: int, rank: int, own: list[int]):
    """The worker's cores and the rank's threads are told, its share is what it may use."""
    code = (
        "import os, sys; from core.settings import Settings; from services.worker import cpu;"
        f"settings = Settings(cpu_affinity='0-1', tensor_parallel_size={degree});"
        f"print(cpu.confine(settings, {rank}), sorted(os.sched_getaffinity(0)))"
    )
    told = subprocess.run(
        [sys.executable, "-c", code], timeout=60, capture_output=True, text=True, check=True
    )
    assert told.stdout.strip() == f"([0, 1], {len(own)}) {own}"


def test_a_worker_sets_its_cores_before_anything_loads_torch():
    """OpenMP reads OMP_WAIT_POLICY when it is loaded: set later, idle threads spin on cores of others."""
    code = (
        "import sys; from services import cli; from services.worker import cpu;"
        "cpu.confine = lambda _: sys.exit(3 if 'torch' in sys.modules else 7);"
        "cli.main(['decode'])"
    )
    assert subprocess.run([sys.executable, "-c", code], timeout=60, check=False).returncode == 7
