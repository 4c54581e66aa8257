"""A cluster whose workers stand still where a test wants them, behind connections that can be cut."""

from __future__ import annotations

import signal
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
from cluster import Cluster, Process, unrest, wait_until
from tcp_proxy import TcpProxy

SILENCE_S = 2.0
LEASE_S = 2.0
MAX_NUM_SEQS = 8
POINTS = {
    "prefill": ("prefill.start", "engine.step"),
    "decode": ("decode.start", "engine.step", "transfer.read"),
}
CHANGING = ("baton_kv_blocks_cached", "baton_step_seconds", "process_", "python_")
"""Gauges that need not be as they were."""


class FaultCluster(Cluster):
    """One prefill and two decode workers. Every connection to a worker goes through its proxy. `folder`: of
    the gates, which are files."""

    def __init__(self, folder: Path) -> None:
        super().__init__(
            prefill=1,
            decode=2,
            transport="shm",
            max_num_batched_tokens=64,
            max_num_seqs=MAX_NUM_SEQS,
            lease_s=LEASE_S,
            step_timeout_s=SILENCE_S,
        )
        self._folder = folder
        self.proxies = {worker.name: TcpProxy(worker.port) for worker in self.workers}
        for worker in self.workers:
            gates = [f"{point}=hold:{self._gate(worker, point)}" for point in POINTS[worker.role]]
            worker.flags |= {"advertise": self.proxies[worker.name].address, "faults": ",".join(gates)}
        addresses = [proxy.address for proxy in self.proxies.values()]
        self.router.flags |= {"discovery": "static://" + ",".join(addresses)}
        self._stopped: set[str] = set()

    def __enter__(self) -> FaultCluster:
        for proxy in self.proxies.values():
            proxy.start()
        super().__enter__()
        self.wait_idle()
        self.gauges_at_rest = {process.name: gauges(process) for process in self.processes}
        return self

    def __exit__(self, *_: object) -> None:
        self.open_gates()
        super().__exit__()
        for proxy in self.proxies.values():
            proxy.stop()

    @property
    def p(self) -> Process:
        return self.worker("prefill-0")

    @property
    def decoders(self) -> list[Process]:
        return [worker for worker in self.workers if worker.role == "decode"]

    # ---- gates

    def close_gate(self, point: str, workers: Iterable[Process], free: int = 0) -> None:
        """From now on whoever reaches `point` there stands still, but for the first `free` times."""
        for worker in workers:
            new = self._folder / "new"
            new.write_text(str(free))
            new.rename(self._gate(worker, point))

    def held_at(self, point: str) -> list[Process]:
        """Workers that stand before it."""
        return [w for w in self.workers if Path(f"{self._gate(w, point)}.held").exists()]

    def open_gate(self, point: str, worker: Process) -> None:
        self._gate(worker, point).unlink()

    def open_gates(self, point: str = "*") -> None:
        """Without a point all, and those forgotten that the dead left."""
        for gate in self._folder.glob(f"*:{point}"):
            gate.unlink(missing_ok=True)

    def wait_held(self, point: str, count: int = 1) -> list[Process]:
        wait_until(lambda: len(self.held_at(point)) >= count, 20, self.log_text)
        return self.held_at(point)

    def _gate(self, worker: Process, point: str) -> Path:
        return self._folder / f"{worker.name}:{point}"

    # ---- what is known of requests and workers

    def record(self, request_id: str) -> dict[str, Any]:
        return self.get(f"/v1/requests/{request_id}").json()

    def states(self) -> dict[str, str]:
        """By worker id, as the router sees them."""
        return {w["id"]: w["state"] for w in self.cluster()}

    def num_resumes(self) -> float:
        return self.router.metric("baton_resumes_total")

    def num_queued(self) -> float:
        """Requests that wait in the router."""
        return self.router.metric("baton_requests_queued")

    def num_sent(self) -> float:
        """Requests that the router sent on without a wait."""
        return self.router.metric("baton_admissions_total", decision="admitted")

    # ---- faults and their end

    def stop_process(self, process: Process) -> None:
        process.kill(signal.SIGSTOP)
        self._stopped.add(process.name)

    def go_on(self) -> None:
        """Those that were stopped."""
        for process in self.processes:
            if process.name in self._stopped and process.alive:
                process.kill(signal.SIGCONT)
        self._stopped.clear()

    def restore(self) -> None:
        """All are there, connected, and idle."""
        self.open_gates()
        self.go_on()
        for proxy in self.proxies.values():
            proxy.heal()
        for process in self.processes:
            if not process.alive:
                process.start()
        self.wait_ready()
        self.assert_at_rest(self.processes)

    def assert_at_rest(self, processes: Iterable[Process], within_s: float = 5.0) -> None:
        """Every block is free, and every gauge is where it was at the start."""
        for process in processes:
            if process is not self.router:
                wait_until(
                    lambda p=process: not unrest(p.ready().get("stats")),
                    within_s,
                    lambda p=process: f"{p.name}: {unrest(p.ready().get('stats'))}",
                )
            at_rest = self.gauges_at_rest[process.name]
            wait_until(
                lambda p=process, rest=at_rest: gauges(p) == rest,
                within_s,
                lambda p=process, rest=at_rest: f"{p.name}: {set(gauges(p).items()) ^ set(rest.items())}",
            )


def gauges(process: Process) -> dict[str, float]:
    """All that a process exports, by series; {} when it does not answer."""
    found: dict[str, float] = {}
    kinds: dict[str, str] = {}
    with suppress(httpx.HTTPError):
        for line in process.metrics().splitlines():
            if line.startswith("# TYPE "):
                _, _, name, kind = line.split()
                kinds[name] = kind
            elif line and not line.startswith("#"):
                series, _, value = line.rpartition(" ")
                name = series.split("{")[0]
                if kinds.get(name) == "gauge" and not name.startswith(CHANGING):
                    found[series] = float(value)
    return found
