"""`baton serve`: starts router and workers on this machine, shows how they come up, keeps them up.

A worker that dies is reported and started again on the same address, with a new incarnation; the
others go on. Ctrl-C ends everything: routers first, so that nobody is sent to a leaving worker.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from types import FrameType

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from checkpoint.open import open_checkpoint
from core.errors import ConfigError
from core.settings import Settings
from services import address
from services.children import SENTENCE, Child, child_flags, secret_environment
from services.local_redis import SCHEME, local_redis
from services.summary import show_summary
from services.worker.cpu import format_cores, parse_cores, split_cores
from services.worker.gpu import VISIBLE, split_gpus, visible_gpus
from wire.channel import Identity

POLL_S = 0.1
RESTARTS_PER_MINUTE = 5


def serve(settings: Settings) -> int:
    """Run until SIGINT or SIGTERM. Raises ConfigError for what cannot start."""
    if settings.log_format == "auto":  # the children's stderr is a pipe, ours is what people see
        form = "console" if sys.stderr.isatty() else "json"
        settings = settings.model_copy(update={"log_format": form})
    if settings.discovery:
        raise ConfigError("`baton serve` starts its own workers; with --discovery run `baton router`")
    open_checkpoint(settings.model)  # the common mistakes, told once and at once
    Identity.of(settings)
    if not settings.redis_url.startswith(SCHEME):
        return _Launcher(settings).run()
    with local_redis(settings.redis_url) as url:
        return _Launcher(settings.model_copy(update={"redis_url": url})).run()


class _Launcher:
    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._console = Console(stderr=True)
        self._stopping = 0
        self._asked_by = signal.SIGINT
        with address.bind(settings.host, settings.port) as listener:
            port = listener.getsockname()[1]
        scheme = "https" if settings.ssl_certfile else "http"
        self._url = f"{scheme}://{address.join(address.reachable(settings.host), port)}"
        self._workers = self._make_workers()
        addresses = ",".join(worker.address for worker in self._workers)
        router = child_flags(settings, discovery=f"static://{addresses}", port=port)
        secrets = secret_environment(settings)
        self._router = Child("router", ["router", *router], f"{self._url}/ready", environment=secrets)
        self._children = [*self._workers, self._router]

    def run(self) -> int:
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self._on_signal)
        try:
            for child in self._children:
                child.start()
            status = self._wait_until_ready()
            if status == 0 and not self._stopping:
                show_summary(self._settings, self._url, self._workers)
                status = self._keep_up()
        finally:
            self._stop_all()
        if status == 0:
            self._say("stopped")
        return status

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self._stopping += 1
        self._asked_by = signal.Signals(number)
        if self._stopping > 1:  # asked twice: no more patience
            for child in self._children:
                child.kill()

    def _make_workers(self) -> list[Child]:
        s = self._settings
        roles = ["prefill"] * s.prefill + ["decode"] * s.decode
        cores = parse_cores(s.cpu_affinity) or sorted(os.sched_getaffinity(0))
        gpus = visible_gpus(os.environ, os.listdir("/dev")) if s.device != "cpu" else []
        places = split_gpus(gpus, len(roles), s.tensor_parallel_size)
        workers = []
        for i, (role, share) in enumerate(zip(roles, split_cores(cores, len(roles)), strict=True)):
            name = f"{role}-{i if role == 'prefill' else i - s.prefill}"
            port, probe_port = address.free_port("127.0.0.1"), address.free_port("127.0.0.1")
            flags = child_flags(
                s,
                worker_id=name,
                listen=f"127.0.0.1:{port}",
                advertise="",
                probe_port=probe_port,
                cpu_affinity=format_cores(share),
                workers_per_gpu=places[i][1] if places else 1,
                disk_cache_dir=os.path.join(s.disk_cache_dir, name) if s.disk_cache_dir else "",
            )
            probe = f"http://127.0.0.1:{probe_port}/ready"
            environment = secret_environment(s) | ({VISIBLE: places[i][0]} if places else {})
            workers.append(Child(name, [role, *flags], probe, f"127.0.0.1:{port}", environment))
        return workers

    def _router_sees_all(self) -> bool:
        """The router answers as soon as one decode worker is there; the first request should find all."""
        listed = self._router.body.get("workers")
        return isinstance(listed, list) and all(worker["state"] == "ready" for worker in listed)

    def _wait_until_ready(self) -> int:
        """Show progress until all are ready; the exit status of the first that gave up, else 0."""
        columns = (TextColumn("{task.fields[name]:10}"), BarColumn(24), TextColumn("{task.description}"))
        deadline = time.monotonic() + self._settings.start_timeout_s
        hidden = not self._console.is_terminal
        with Progress(
            *columns, TimeElapsedColumn(), console=self._console, transient=True, disable=hidden
        ) as progress:
            bars = {c.name: progress.add_task("starting", name=c.name, total=1.0) for c in self._children}
            while not self._stopping:
                for child in self._children:
                    if (status := child.exit_status()) is not None:
                        return self._give_up(child, status)
                    body = child.probe()
                    progress.update(
                        bars[child.name],
                        completed=1.0 if child.ready else float(str(body.get("progress", 0.0))),
                        description="ready" if child.ready else str(body.get("doing", "starting")),
                    )
                if all(child.ready for child in self._children) and self._router_sees_all():
                    return 0
                if time.monotonic() > deadline:
                    late = ", ".join(c.name for c in self._children if not c.ready)
                    raise ConfigError(
                        f"{late} did not become ready within {self._settings.start_timeout_s:.0f} s; "
                        f"see the log above, or raise --start-timeout-s"
                    )
                time.sleep(POLL_S)
        return 0

    def _give_up(self, child: Child, status: int) -> int:
        """The exit status for a child that ended while starting. Raises what it refused as its own."""
        ending = _ending(child, status)
        if status == 2 and child.last_words:
            raise ConfigError(child.last_words)
        self._say(f"{child.name} ended with {ending} while starting; see the log above")
        return status if status > 0 else 1

    def _keep_up(self) -> int:
        """Until asked to stop: exit status 0; or until no worker is left: 1."""
        while not self._stopping:
            for child in self._children:
                status = child.exit_status()
                if status is None or child.given_up:
                    continue
                died = f"{child.name} (pid {child.pid}) died with {_ending(child, status)}"
                if self._settings.restart_workers and child.restarts_within(60.0) < RESTARTS_PER_MINUTE:
                    self._say(f"{died}; starting it again")
                    child.start()
                else:
                    child.given_up = True
                    self._say(f"{died} and stays down; the rest go on")
            if all(child.given_up for child in self._workers):
                self._say("no worker is left; stopping")
                return 1
            time.sleep(POLL_S)
        return 0

    def _stop_all(self) -> None:
        """Router first, then the workers, to whom nobody sends any more; bounded, then SIGKILL."""
        limit_s = self._settings.shutdown_grace_s + self._settings.drain_timeout_s + 5.0
        for group, number in (([self._router], self._asked_by), (self._workers, signal.SIGINT)):
            deadline = time.monotonic() + limit_s
            for child in group:  # one that never answered may have no handlers yet: SIGINT gives a traceback
                child.send(number if child.body else signal.SIGTERM)
            for child in group:
                child.wait(max(0.1, deadline - time.monotonic()))

    def _say(self, text: str) -> None:
        print(f"{SENTENCE}{text}", file=sys.stderr, flush=True)


def _ending(child: Child, status: int) -> str:
    """`signal 9`, `status 1`, or `status 2 (its last words)`."""
    child.flush()
    how = f"signal {-status}" if status < 0 else f"status {status}"
    return f"{how} ({child.last_words})" if child.last_words else how
