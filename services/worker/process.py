"""The life of a worker process: probes first, then the model, then the services; drain at the end."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import uuid
from collections.abc import Callable, Sequence
from typing import Protocol

import grpc
import uvloop
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_health.v1._async import HealthServicer

from core import faults, log
from core.settings import Settings
from services import address, discovery
from services.host_list import HostList
from services.worker.build import build
from services.worker.cpu import format_cores
from services.worker.host import Phase, WorkerHost
from services.worker.hub import Hub
from services.worker.life import Life
from services.worker.metrics import WorkerMetrics
from services.worker.probes import ProbeServer
from services.worker.watch import WatchService
from wire import channel
from wire.v1 import worker_pb2_grpc

ENGINE_LOOK_S = 0.2
"""How often a worker looks whether its engine's thread still lives."""

_log = log.get("worker")


class Service(Protocol):
    """A role's gRPC service. Both roles' services run in every worker; the role is what it advertises."""

    async def close(self) -> None:
        """End all work and wait, bounded, until nothing of it is in flight."""
        ...


Attach = Callable[[WorkerHost, grpc.aio.Server], Service]


def run(settings: Settings, role: str, attach: Sequence[Attach], cores: list[int], threads: int) -> int:
    """Serve until SIGTERM or SIGINT; returns the exit status. Raises ConfigError before serving.

    `cores` and `threads`: what `services.worker.cpu.confine` gave, before this module was imported.
    """
    settings = with_place(settings, role).model_copy(update={"cpu_affinity": format_cores(cores)})
    faults.configure(settings.faults)
    identity = channel.Identity.of(settings)
    HostList.parse(settings.transfer_hosts)
    announcement = discovery.announcement_for(settings)
    return uvloop.run(_main(settings, role, attach, cores, threads, identity, announcement))


def with_place(settings: Settings, role: str) -> Settings:
    """`settings` with the port to listen on chosen, the address that peers are told and a worker id.

    Raises ConfigError for an address that nobody can listen on or connect to.
    """
    listen_host, wanted = address.split(settings.listen, "--listen")
    address.announced(settings.listen, settings.advertise)
    with address.bind(listen_host, wanted, host_flag="--listen", port_flag="--listen") as listener:
        listen = address.join(listen_host, listener.getsockname()[1])
    advertise = settings.advertise or listen
    # The address, since routers reach no two workers at one; a pid is 1 in every container.
    worker_id = settings.worker_id or "{}-{}-{}".format(role, *address.split(advertise, "--advertise"))
    place = {"listen": listen, "advertise": advertise, "worker_id": worker_id}
    return settings.model_copy(update=place)


async def _main(
    settings: Settings,
    role: str,
    attach: Sequence[Attach],
    cores: list[int],
    threads: int,
    identity: channel.Identity,
    announcement: discovery.Announcement | None,
) -> int:
    incarnation = uuid.uuid4().hex[:12]
    worker_id = settings.worker_id
    log.configure(settings.log_level, settings.log_format, worker=worker_id)
    host = WorkerHost(settings, role, worker_id, incarnation, Hub(), cores=cores, identity=identity)
    stop = Stop(host)
    probes = ProbeServer(host)
    announced_host, _ = address.split(settings.advertise, "--advertise")
    host.probe_address = address.join(announced_host, await probes.start())

    def progress(doing: str, share: float) -> None:
        host.progress = (doing, share)

    built = await asyncio.to_thread(
        build, settings, worker_id, incarnation, threads, host.hub.emit, host.kv_events, progress
    )
    host.loaded(
        built,
        WorkerMetrics(
            built.loop,
            built.prompt_token_s,
            built.stack,
            host.hub,
            role,
            worker_id,
            model_label(settings),
        ),
    )
    server = channel.server(identity, host.metrics.call_refused)
    services = [make(host, server) for make in attach]
    life = Life(host)
    watch = WatchService(host, life.change_role)
    worker_pb2_grpc.add_WorkerServicer_to_server(watch, server)
    checks = HealthServicer()
    health_pb2_grpc.add_HealthServicer_to_server(checks, server)
    host.address = await _listen(server, settings, identity)
    built.loop.start(watch.changed)
    host.ready(role)
    await checks.set("", health_pb2.HealthCheckResponse.SERVING)
    if announcement:
        announcement.start(host.metrics.announcement_failed)
    _log.info("worker.ready", address=host.address, probes=host.probe_address, incarnation=incarnation)
    if not await until_asked(stop.asked, host):
        ended = (built.processes and built.processes.lost) or "its error is above"
        _log.error("worker.engine_died", hint=f"{ended}; exiting, to be started again")
        watch.close()
        with contextlib.suppress(TimeoutError):  # what the engine's end meant for requests still goes out
            await asyncio.wait_for(server.stop(grace=ENGINE_LOOK_S), 2.0)
        if built.processes:
            built.processes.kill()  # also a rank that hangs
        os._exit(1)  # nothing is left to drain, and no thread to wait for
    await checks.enter_graceful_shutdown()
    withdrawing = asyncio.create_task(announcement.withdraw()) if announcement else None
    if cut := await life.leave(stop.grace_s):
        _log.warning("worker.cut", left=cut, hint="their routers go on with them elsewhere")
    watch.close()
    for service in services:
        await service.close()
    await server.stop(grace=1.0)
    if withdrawing:
        await withdrawing
    await probes.stop()
    if built.stack:
        await built.stack.close()
    await asyncio.to_thread(built.close)
    _log.info("worker.stopped")
    return 0


def model_label(settings: Settings) -> str:
    """The metric label of the model: the served name, or the file's."""
    return settings.served_model_name or os.path.basename(settings.model.rstrip("/")) or "embedded"


class Stop:
    """The first signal asks the worker to leave, SIGINT without `shutdown_grace_s`: somebody waits at a
    terminal, or nobody sends any more. While it loads, and on a second signal, the process ends at once."""

    def __init__(self, host: WorkerHost) -> None:
        self._host = host
        self.asked = asyncio.Event()
        self.grace_s = 0.0
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._on_signal, number)

    def _on_signal(self, number: int) -> None:
        if self._host.phase is Phase.LOADING:
            os._exit(0)
        if self.asked.is_set():
            os._exit(1)
        if number == signal.SIGTERM:
            self.grace_s = self._host.settings.shutdown_grace_s
        self.asked.set()


async def until_asked(stop: asyncio.Event, host: WorkerHost) -> bool:
    """Wait until `stop` is set; False when the engine or one of its ranks died before."""
    while not stop.is_set():
        if host.built.failed:
            return False
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(stop.wait(), ENGINE_LOOK_S)
    return True


async def _listen(server: grpc.aio.Server, settings: Settings, identity: channel.Identity) -> str:
    """Bind and start; returns host:port as peers reach it."""
    channel.listen(server, settings.listen, identity)
    await server.start()
    listen_host, _ = address.split(settings.listen, "--listen")
    if (weakness := identity.weakness()) and not address.is_loopback(listen_host):
        _log.warning("worker.unprotected", listen=settings.listen, reason=weakness)
    return settings.advertise
