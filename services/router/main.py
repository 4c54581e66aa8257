"""The router's process: listen first, then read the model's files, then follow the workers."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import socket
from collections.abc import Iterator

import uvicorn
import uvloop

from core import log
from core.errors import ConfigError
from core.settings import Settings
from services import discovery
from services.router.app import create_app
from services.router.fleet import Fleet
from services.router.router import Router
from services.router.text import TextSide

BACKLOG = 2048

logger = log.get("router")


def run(settings: Settings) -> int:
    """Serve until SIGTERM or SIGINT, then finish what runs for `drain_timeout_s`; a second signal ends
    it at once. Returns the exit status. Raises ConfigError for settings or files that cannot work."""
    source = discovery.from_url(settings.discovery)
    with (
        contextlib.closing(listen(settings.host, settings.port)) as listener,
        asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner,
    ):
        return runner.run(_serve(settings, source, listener))


def listen(host: str, port: int) -> socket.socket:
    """A listening socket. Raises ConfigError when the address cannot be had."""
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        listener = socket.create_server((host, port), family=family, backlog=BACKLOG)
    except OSError as error:
        raise ConfigError(
            f"cannot listen on {host}:{port}: {error.strerror}; choose another --port"
        ) from None
    # Connections inherit it. Without it each small event may wait 40 ms for the last one's ACK.
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return listener


class _Server(uvicorn.Server):
    """uvicorn raises caught signals again after it has served, which would end the process with them."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


async def _serve(settings: Settings, source: discovery.Discovery, listener: socket.socket) -> int:
    router = Router(settings)
    server = _Server(
        uvicorn.Config(
            create_app(router),
            http="httptools",
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            timeout_graceful_shutdown=max(1, round(settings.drain_timeout_s)),
        )
    )

    def stop() -> None:
        server.force_exit = router.draining
        server.should_exit = router.draining = True

    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop)
    host, port = listener.getsockname()[:2]
    logger.info("router.listening", host=host, port=port)
    work = asyncio.create_task(_work(router, source))
    work.add_done_callback(lambda _: setattr(server, "should_exit", True))
    await server.serve(sockets=[listener])
    work.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await work
    logger.info("router.stopped")
    return 0


async def _work(router: Router, source: discovery.Discovery) -> None:
    """Everything beside HTTP. Ends only by being cancelled or by failing."""
    text = await asyncio.to_thread(TextSide, router.settings, router.metrics.count_fault)
    silence_s = router.settings.step_timeout_s
    router.fleet = Fleet(source, text.tokenizer_digest, silence_s, router.metrics.count_fault)
    router.text = text
    logger.info("router.loaded", model=text.name)
    try:
        await router.fleet.run()
    finally:
        text.close()
