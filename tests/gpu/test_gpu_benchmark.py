"""The whole GPU check, `baton serve` included, as CI on a machine with a GPU runs it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(600)]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")
def test_benchmark_finds_nothing_wrong() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.gpu"],
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        timeout=540,
    )
    print(done.stdout)
    assert done.returncode == 0, done.stderr
