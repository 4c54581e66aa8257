"""The shipped Triton kernels compile for every target without spilling, as CI prints with benchmarks.triton_aot."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def compiled(cache_dir: Path, *flags: str, timeout: float) -> list[dict]:
    """Rows of the table; in a process of its own, since this one may interpret kernels."""
    env = {**os.environ, "TRITON_CACHE_DIR": str(cache_dir)}
    env.pop("TRITON_INTERPRET", None)
    command = [sys.executable, "-m", "benchmarks.triton_aot", "--json", *flags]
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=timeout)
    assert done.returncode == 0, done.stdout + done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def test_windowed_attention_compiles_for_every_target(tmp_path: Path) -> None:
    """A sample of the whole; windowed kernels need the most registers."""
    rows = compiled(tmp_path, "--kernels", "prefill,decode", "--only", "dim 128 bf16 window", timeout=100)
    assert {row["target"] for row in rows} == {"sm_80", "sm_90", "sm_100"}
    assert {row["kernel"] for row in rows} == {"prefill", "decode"}
    assert not any(row["spills"] for row in rows)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_every_shipped_configuration_compiles_without_spills(tmp_path: Path) -> None:
    rows = compiled(tmp_path, timeout=1700)
    assert not [row for row in rows if row["spills"]]
    assert {row["kernel"] for row in rows} == {
        "rms_norm",
        "head_norm",
        "sample",
        "silu_mul",
        "rope",
        "prefill",
        "decode",
        "reduce",
        "copy",
    }
