"""How long a decode worker takes to be ready, and what memory it holds then.

    python -m benchmarks.startup [--formats fp32,bf16,bf16+int8] [--threads 1] [--repeat 3]

A real process, `baton decode`, from its exec until /ready says ready; the shortest start counts. The first
start on a machine also converts the weights and builds the kernels. Memory is RSS without the KV pool.
"""

from __future__ import annotations

import argparse
import os
import signal
import time
from dataclasses import dataclass

import psutil
from rich.console import Console
from rich.table import Table

from core.settings import Settings
from services.address import free_port
from services.children import Child, child_flags
from services.worker.cpu import format_cores

LIMIT_S, POLL_S = 120.0, 0.02


@dataclass(frozen=True, slots=True)
class Startup:
    """`rss_nbytes`: resident memory besides the KV pool."""

    seconds: float
    rss_nbytes: int


def measure(number_format: str, threads: int, repeat: int) -> Startup:
    """Start a worker of the embedded model `repeat` times, one after the other, on the first `threads` cores
    that this process may use. Raises SystemExit when one does not become ready."""
    dtype, _, quantization = number_format.partition("+")
    settings = Settings.model_validate({"dtype": dtype, "quantization": quantization or "none"})
    cores = sorted(os.sched_getaffinity(0))[:threads]
    starts = [_start(settings, cores) for _ in range(repeat)]
    return Startup(min(start.seconds for start in starts), min(start.rss_nbytes for start in starts))


def _start(settings: Settings, cores: list[int]) -> Startup:
    port = free_port("127.0.0.1")
    flags = child_flags(
        settings,
        worker_id="decode-0",
        probe_port=port,
        cpu_affinity=format_cores(cores),
        log_level="error",
    )
    worker = Child("decode-0", ["decode", *flags], f"http://127.0.0.1:{port}/ready")
    started = time.perf_counter()
    worker.start()
    try:
        while not (worker.probe() and worker.ready):
            waited_s = time.perf_counter() - started
            if worker.exit_status() is not None or waited_s > LIMIT_S:
                worker.flush()
                why = worker.last_words or "see its log above"
                raise SystemExit(f"`baton decode` was not ready after {waited_s:.0f} s: {why}")
            time.sleep(POLL_S)
        took_s = time.perf_counter() - started
        footprint = worker.body["footprint"]
        assert isinstance(footprint, dict)
        return Startup(took_s, psutil.Process(worker.pid).memory_info().rss - footprint["kv_nbytes"])
    finally:
        worker.send(signal.SIGTERM)
        worker.wait(15.0)


def main() -> None:
    parser = argparse.ArgumentParser(description="Start-up time and memory of a worker.")
    parser.add_argument("--formats", default="fp32,bf16,bf16+int8")
    parser.add_argument("--threads", type=int, default=1, help="cores of the worker")
    parser.add_argument("--repeat", type=int, default=3)
    given = parser.parse_args()
    table = Table(
        "format", "ready, s", "RSS without pool, MB", title=f"`baton decode`, {given.threads} core(s)"
    )
    for number_format in given.formats.split(","):
        startup = measure(number_format, given.threads, given.repeat)
        table.add_row(number_format, f"{startup.seconds:.1f}", f"{startup.rss_nbytes / 1e6:.0f}")
    Console().print(table)


if __name__ == "__main__":
    main()
