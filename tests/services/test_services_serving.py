"""A benchmark's server ends with the benchmark, whatever it does."""

from __future__ import annotations

import subprocess
import sys

import pytest

from benchmarks import serving

DEAF = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('up', flush=True); time.sleep(99)"


@pytest.mark.parametrize(
    ("program", "status"),
    [(DEAF, -9), (DEAF.replace("signal.SIG_IGN", "signal.SIG_DFL"), -15)],
    ids=["deaf", "obedient"],
)
def test_a_server_that_does_not_end_is_killed(
    program: str, status: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(serving, "END_S", 0.3 if status == -9 else 30.0)
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"up\n"
        serving.end(process)
        assert process.returncode == status


def test_a_server_that_ends_is_told() -> None:
    with (
        pytest.raises(SystemExit, match="ended with status"),
        serving.served("--no-such-flag", deadline=float("inf")),
    ):
        raise AssertionError("it was ready")
