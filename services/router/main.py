"""The router's process: listen first, then read the model's files, then follow the workers."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import signal
import socket
from collections.abc import AsyncIterator, Callable, Iterator

import uvicorn
import uvloop
from starlette.types import ASGIApp

from core import log
from core.errors import ConfigError
from core.settings import Settings
from services import discovery
from services.router.app import create_admin_app, create_app
from services.router.fleet import Fleet
from services.router.https import HTTPS
from services.router.router import Router
from services.router.shutdown import end_on_signals
from services.router.text import TextSide
from wire.channel import Identity

BACKLOG = 2048
CLOSE_S = 1
"""How long connections may take to close, once nothing runs any more."""

logger = log.get("router")


def run(settings: Settings) -> int:
    """Serve until SIGTERM or SIGINT, and end as `services.router.shutdown` says. Returns the exit status.

    Raises ConfigError for settings or files that cannot work.
    """
    source = discovery.from_settings(settings)
    https, identity = HTTPS(settings), Identity.of(settings)
    with (
        contextlib.closing(listen(settings.host, settings.port)) as listener,
        _listen_for_admins(settings) as admin_listener,
        asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner,
    ):
        return runner.run(_serve(settings, source, listener, admin_listener, https, identity))


@contextlib.contextmanager
def _listen_for_admins(settings: Settings) -> Iterator[socket.socket | None]:
    if settings.admin_port is None:
        yield None
        return
    with contextlib.closing(listen(settings.admin_host, settings.admin_port, "--admin-port")) as listener:
        yield listener


def listen(host: str, port: int, flag: str = "--port") -> socket.socket:
    """A listening socket. Raises ConfigError when the address cannot be had."""
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        listener = socket.create_server((host, port), family=family, backlog=BACKLOG)
    except OSError as error:
        raise ConfigError(
            f"cannot listen on {host}:{port}: {error.strerror}; choose another {flag}"
        ) from None
    # Connections inherit it. Without it each small event may wait 40 ms for the last one's ACK.
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return listener


class _Server(uvicorn.Server):
    """uvicorn raises caught signals again after it has served, which would end the process with them."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


async def _serve(
    settings: Settings,
    source: discovery.Discovery,
    listener: socket.socket,
    admin_listener: socket.socket | None,
    https: HTTPS,
    identity: Identity,
) -> int:
    router = Router(settings)
    server = _make_server(create_app(router), https)
    end_on_signals(router, server)
    asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, router.reload_keys)
    host, port = listener.getsockname()[:2]
    logger.info("router.listening", host=host, port=port, scheme=https.scheme)
    work = asyncio.create_task(_work(router, source, https, identity))

    def end(_: asyncio.Task[None]) -> None:
        server.should_exit = True

    work.add_done_callback(end)
    async with _serve_admins(router, admin_listener, https, end):
        await server.serve(sockets=[listener])
    work.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await work
    logger.info("router.stopped")
    return 0


def _make_server(app: ASGIApp, https: HTTPS) -> _Server:
    return _Server(
        uvicorn.Config(
            https.protect(app),
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            timeout_graceful_shutdown=CLOSE_S,
            **https.options(),
        )
    )


@contextlib.asynccontextmanager
async def _serve_admins(
    router: Router,
    listener: socket.socket | None,
    https: HTTPS,
    ended: Callable[[asyncio.Task[None]], None],
) -> AsyncIterator[None]:
    """The admin port, for as long as the other one is served. Where it fails sooner, `ended` is told, and the
    failure is raised at the end."""
    if listener is None:
        yield
        return
    server = _make_server(create_admin_app(router), https)
    host, port = listener.getsockname()[:2]
    logger.info("router.admin_listening", host=host, port=port, scheme=https.scheme)
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    serving.add_done_callback(ended)
    try:
        yield
    finally:
        server.should_exit = True
        await serving


async def _work(router: Router, source: discovery.Discovery, https: HTTPS, identity: Identity) -> None:
    """Everything beside HTTP. Ends only by being cancelled or by failing."""
    text = await asyncio.to_thread(TextSide, router.settings, router.metrics.count_fault)
    silence_s = router.settings.step_timeout_s
    router.fleet = Fleet(
        source, text.tokenizer_digest, silence_s, router.metrics.count_fault, identity=identity
    )
    router.text = text
    logger.info("router.loaded", model=text.name)
    gc.collect()
    gc.freeze()  # some 80,000 objects, there for good
    try:
        async with asyncio.TaskGroup() as group:
            for each in (router.fleet.run(), router.pace.follow(), https.follow()):
                group.create_task(each)
    finally:
        text.close()
