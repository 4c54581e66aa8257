"""Real processes for end-to-end tests: router, prefill and decode workers on loopback."""

from __future__ import annotations

import json
import os
import signal
import ssl
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import httpx

from services.address import free_port

ROOT = Path(__file__).resolve().parents[2]
GOLD = {case["name"]: case for case in json.loads((ROOT / "tests/data/gold.json").read_text())["cases"]}
START_S = 90.0
PLAIN = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
"""Not used for http, but without one httpx reads all certificates for each request: 80 ms."""
FLAGS = {"dtype": "fp32", "num_blocks": 400, "log_level": "info", "cpu_threads": 1, "min_remote_tokens": 16}
FLAGS |= {"shutdown_grace_s": 0}


@dataclass
class Process:
    """One Baton process, its log and its probe. `env`: on top of this process's environment. `tls`: whom its probe
    is to be believed by, where that is HTTPS."""

    name: str
    role: str
    flags: dict[str, object]
    port: int = 0
    probe_port: int = 0
    env: dict[str, str] = field(default_factory=dict)
    tls: ssl.SSLContext | None = None
    popen: subprocess.Popen[bytes] | None = None
    log: Path = field(default_factory=lambda: Path(tempfile.mkstemp(suffix=".log")[1]))

    def __post_init__(self) -> None:
        self.first_flags = self.flags

    def start(self) -> None:
        arguments = [_argument(name.replace("_", "-"), value) for name, value in self.flags.items()]
        with self.log.open("ab") as log:
            self.popen = subprocess.Popen(
                [sys.executable, "-m", "services.cli", self.role, *arguments],
                cwd=ROOT, env=os.environ | self.env, stdin=subprocess.DEVNULL, stdout=log, stderr=log,
            )  # fmt: skip

    @property
    def pid(self) -> int:
        assert self.popen
        return self.popen.pid

    @property
    def alive(self) -> bool:
        return self.popen is not None and self.popen.poll() is None

    def kill(self, number: int = signal.SIGKILL) -> None:
        assert self.popen
        self.popen.send_signal(number)
        if number == signal.SIGKILL:
            self.popen.wait(10)

    def ask_to_stop(self) -> None:
        """SIGTERM, also to one that a test left stopped."""
        if self.popen and self.alive:
            self.popen.send_signal(signal.SIGCONT)
            self.popen.terminate()

    def stop(self) -> int | None:
        """SIGTERM and the exit status; SIGKILL when it does not end in time. None if it never began."""
        if self.popen is None:
            return None
        self.ask_to_stop()
        return self.wait_end(20)

    def wait_end(self, within_s: float) -> int:
        """Its exit status; killed when it does not end in time."""
        assert self.popen
        try:
            self.popen.wait(within_s)
        except subprocess.TimeoutExpired:
            self.popen.kill()
            self.popen.wait(10)
        return self.popen.returncode

    def ready(self) -> dict[str, Any]:
        """The body of its readiness probe; {} when it does not answer."""
        try:
            return self._probe("ready", 2).json()
        except (httpx.HTTPError, ValueError):
            return {}

    def stats(self) -> dict[str, int]:
        """The worker's counters and gauges (`engine.messages.EngineStats`); {} when it does not answer."""
        return self.ready().get("stats", {})

    def metric(self, name: str, **labels: str) -> float:
        """Sum of a metric's series that carry these labels; a name that is not exported is an error."""
        return sum_of(self.metrics(), name, **labels)

    def metrics(self) -> str:
        """What the probe exports now, as text."""
        return self._probe("metrics", 5).text

    def _probe(self, path: str, timeout_s: float) -> httpx.Response:
        scheme = "https" if self.tls else "http"
        url = f"{scheme}://127.0.0.1:{self.probe_port}/{path}"
        return httpx.get(url, timeout=timeout_s, verify=self.tls or PLAIN)


def _argument(name: str, value: object) -> str:
    if isinstance(value, bool):
        return f"--{name}" if value else f"--no-{name}"
    return f"--{name}={value}"


def sum_of(metrics: str, name: str, **labels: str) -> float:
    """Of `Process.metrics`, as `Process.metric`."""
    exported = name.removesuffix("_count").removesuffix("_sum")
    assert f"# TYPE {exported} " in metrics, f"{name} is not exported"
    total = 0.0
    for line in metrics.splitlines():
        head, _, value = line.rpartition(" ")
        if head.split("{")[0] == name and all(f'{k}="{v}"' in head for k, v in labels.items()):
            total += float(value)
    return total


class Cluster:
    """Processes that belong together; use as a context manager. `tls`: the client's side of HTTPS to the router.
    `headers`: on each request to it. `env`: of all processes, on top of ours; without BATON_DISCOVERY in it the
    router has a list of the workers."""

    def __init__(
        self,
        prefill: int = 1,
        decode: int = 1,
        prefill_flags: dict[str, object] | None = None,
        decode_flags: dict[str, object] | None = None,
        tls: ssl.SSLContext | None = None,
        headers: dict[str, str] | None = None,
        env: dict[str, str] | None = None,
        **flags: object,
    ) -> None:
        self.verify, self.headers, env = tls or PLAIN, headers or {}, env or {}
        cores = sorted(os.sched_getaffinity(0))
        common = FLAGS | flags
        self.workers: list[Process] = []
        for i in range(prefill + decode):
            role = "prefill" if i < prefill else "decode"
            own = (prefill_flags if role == "prefill" else decode_flags) or {}
            name = f"{role}-{i if role == 'prefill' else i - prefill}"
            port, probe = free_port("127.0.0.1"), free_port("127.0.0.1")
            place = {"worker_id": name, "listen": f"127.0.0.1:{port}", "probe_port": probe}
            place["cpu_affinity"] = cores[i % len(cores)]
            self.workers.append(Process(name, role, common | place | own, port, probe, env))
        port, admin_port = free_port("127.0.0.1"), free_port("127.0.0.1")
        discovery = "static://" + ",".join(f"127.0.0.1:{worker.port}" for worker in self.workers)
        router_flags = {k: v for k, v in common.items() if k not in ("num_blocks", "cpu_threads")}
        place: dict[str, object] = {"port": port, "admin_port": admin_port}
        if "BATON_DISCOVERY" not in env:
            place["discovery"] = discovery
        self.router = Process("router", "router", router_flags | place, port, port, env, tls)
        scheme = "https" if tls else "http"
        self.url = f"{scheme}://127.0.0.1:{port}"
        self.admin_url = f"{scheme}://127.0.0.1:{admin_port}"
        self._model = ""

    def __enter__(self) -> Cluster:
        for process in self.processes:
            process.start()
        try:
            self.wait_ready()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for process in self.processes:
            process.ask_to_stop()
        for process in self.processes:
            process.stop()
            process.log.unlink(missing_ok=True)

    @property
    def processes(self) -> list[Process]:
        return [*self.workers, self.router]

    @property
    def model(self) -> str:
        """The served name, as `/v1/models` tells it."""
        if not self._model:
            self._model = self.get("/v1/models").json()["data"][0]["id"]
        return self._model

    def worker(self, name: str) -> Process:
        return next(worker for worker in self.workers if worker.name == name)

    def wait_ready(self, workers: Iterable[Process] | None = None, state: str = "ready") -> None:
        """Until the router sees these workers (None = all), in their present life, in this state."""
        awaited = list(self.workers if workers is None else workers)

        def ready() -> bool:
            for process in (*awaited, self.router):
                if not process.alive:
                    raise AssertionError(f"{process.name} ended: {process.log.read_text()[-3000:]}")
            listed = self.cluster() if self.router.ready() else []
            return {w.pid for w in awaited} <= {w["pid"] for w in listed if w["state"] == state}

        wait_until(ready, START_S, lambda: str(self.cluster()))

    def get(self, path: str) -> httpx.Response:
        """One of the router's routes."""
        return httpx.get(f"{self.url}{path}", headers=self.headers, timeout=5, verify=self.verify)

    def cluster(self) -> list[dict[str, Any]]:
        try:
            return self.get("/v1/cluster").json()["workers"]
        except (httpx.HTTPError, ValueError, KeyError):
            return []

    def body(self, prompt: Any, **more: Any) -> dict[str, Any]:
        """A completion request: greedy, 48 tokens, token ids returned; `more` goes on top."""
        greedy = {"temperature": 0, "max_tokens": 48, "return_token_ids": True}
        return {"model": self.model, "prompt": prompt} | greedy | more

    def complete(self, prompt: Any, plan: str = "auto", timeout: float = 120, **more: Any) -> httpx.Response:
        """POST /v1/completions and wait for the whole answer."""
        headers = self.headers | {"X-Baton-Plan": plan}
        url, body = f"{self.url}/v1/completions", self.body(prompt, **more)
        return httpx.post(url, json=body, headers=headers, timeout=timeout, verify=self.verify)

    @contextmanager
    def stream(
        self, prompt: Any, plan: str = "auto", timeout: float = 120, **more: Any
    ) -> Iterator[Iterator[dict[str, Any]]]:
        """POST /v1/completions with `stream`; yields the events, [DONE] as `{"done": True}`.

        Leaving the block early closes the connection, as a client does that goes away.
        """
        headers = self.headers | {"X-Baton-Plan": plan}
        body = self.body(prompt, stream=True, **more)
        url = f"{self.url}/v1/completions"
        with httpx.stream(
            "POST", url, json=body, headers=headers, timeout=timeout, verify=self.verify
        ) as reply:
            if reply.status_code != 200:
                raise AssertionError(f"{reply.status_code}: {reply.read().decode()}")
            yield events(reply.iter_lines())

    def post_only(self, prompt: Any, plan: str = "auto", **more: Any) -> HTTPConnection:
        """Send a completion request and read nothing; closing the connection is a client that leaves."""
        connection = HTTPConnection("127.0.0.1", self.router.port, timeout=10)
        headers = {"X-Baton-Plan": plan, "Content-Type": "application/json"}
        connection.request("POST", "/v1/completions", json.dumps(self.body(prompt, **more)), headers)
        return connection

    def restart(self, name: str, state: str = "ready", **flags: object) -> Process:
        """End a worker, start it again on its ports with its first flags and these on top."""
        worker = self.worker(name)
        worker.stop()
        worker.flags = worker.first_flags | flags
        worker.start()
        self.wait_ready([worker], state)
        return worker

    def ensure(self, name: str, **flags: object) -> Process:
        """The worker with its first flags and these on top; restarted only if it is not that now."""
        worker = self.worker(name)
        if worker.alive and worker.flags == worker.first_flags | flags:
            return worker
        return self.restart(name, **flags)

    def log_text(self) -> str:
        return "".join(process.log.read_text() for process in self.processes)

    def wait_idle(self, within_s: float = 2.0, only: Iterable[str] | None = None) -> None:
        """Every worker is back at rest: free + cached-unreferenced = total, gauges at zero."""
        names = list(only) if only is not None else [worker.name for worker in self.workers]

        def idle() -> bool:
            return all(not unrest(self.worker(name).ready().get("stats")) for name in names)

        wait_until(
            idle, within_s, lambda: str({n: unrest(self.worker(n).ready().get("stats")) for n in names})
        )


def events(lines: Iterable[str]) -> Iterator[dict[str, Any]]:
    """The `data:` events of a stream."""
    for line in lines:
        if line == "data: [DONE]":
            yield {"done": True}
        elif line.startswith("data: "):
            yield json.loads(line.removeprefix("data: "))


def unrest(stats: dict[str, int] | None) -> dict[str, int]:
    """What keeps a worker from being idle; {} when nothing does."""
    if stats is None:
        return {"no answer": 1}
    left = {k: stats[k] for k in ("running", "waiting", "loading", "held", "quarantined_blocks") if stats[k]}
    if stats["free_blocks"] != stats["total_blocks"]:
        left["blocks_missing"] = stats["total_blocks"] - stats["free_blocks"]
    return left


def wait_until(condition: Callable[[], bool], within_s: float, explain: Callable[[], str] = str) -> float:
    """Poll until true; returns the seconds it took. Raises AssertionError with `explain()`."""
    started = time.monotonic()
    while not condition():
        if time.monotonic() - started > within_s:
            raise AssertionError(f"not within {within_s} s: {explain()}")
        time.sleep(0.02)
    return time.monotonic() - started


def matches_gold(name: str, token_ids: list[int], max_tokens: int = 48) -> bool:
    """Equal to GOLD's first `max_tokens` up to the first step whose two best tokens are closer than 1e-3."""
    case = GOLD[name]
    expected = case["output_ids"][:max_tokens]
    for step, (ours, theirs) in enumerate(zip(token_ids, expected, strict=False)):
        if ours != theirs:
            best = case["top5"][step]
            return best[0][1] - best[1][1] < 1e-3
    return len(token_ids) == len(expected)


def prompt(name: str) -> list[int]:
    """The token ids of a GOLD case."""
    return GOLD[name]["prompt_ids"]


def only_choice(reply: httpx.Response) -> dict[str, Any]:
    """The one choice of a good answer."""
    assert reply.status_code == 200, reply.text
    (choice,) = reply.json()["choices"]
    return choice


def is_gold(reply: httpx.Response, name: str, max_tokens: int = 48) -> bool:
    """A good answer whose one choice is GOLD's (see `matches_gold`)."""
    return matches_gold(name, only_choice(reply)["token_ids"], max_tokens)


def fresh_salt() -> str:
    """A cache salt that no request has used: a cold run."""
    return uuid.uuid4().hex
