"""A worker's small HTTP side: its probes and /metrics.

/startup        the model is loaded
/live, /health  this loop and the engine's move; also while the model is loaded
/ready          it takes work: loaded, not draining, not hung
"""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import asdict

import uvicorn
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from services import address
from services.worker.host import Phase, WorkerHost


def application(host: WorkerHost) -> Starlette:
    async def startup(_: Request) -> Response:
        doing, share = host.progress
        loading = host.phase is Phase.LOADING
        body = {"status": "loading" if loading else "started", "doing": doing, "progress": share}
        return JSONResponse(body, 503 if loading else 200)

    async def live(_: Request) -> Response:
        hung = host.hung()
        return JSONResponse({"status": "hung" if hung else "alive"}, 503 if hung else 200)

    async def ready(_: Request) -> Response:
        doing, share = host.progress
        body: dict[str, object] = {
            "state": "hung" if host.hung() else str(host.phase),
            "worker_id": host.worker_id,
            "doing": doing,
            "progress": share,
        }
        if host.phase is not Phase.LOADING:
            body |= {"address": host.address, "cores": host.cores, "role": host.role}
            built = host.built
            body |= {"footprint": asdict(built.footprint), "stats": asdict(built.loop.stats)}
            tiers = built.stack.stats() if built.stack else {}
            body |= {"tiers": {name: asdict(stats) for name, stats in tiers.items()}}
        return JSONResponse(body, 200 if body["state"] == Phase.READY else 503)

    async def metrics(_: Request) -> Response:
        if host.phase is Phase.LOADING:
            return Response("", media_type=CONTENT_TYPE_LATEST)
        return Response(generate_latest(host.metrics.registry), media_type=CONTENT_TYPE_LATEST)

    routes = {"/startup": startup, "/live": live, "/health": live, "/ready": ready, "/metrics": metrics}
    return Starlette(routes=[Route(path, endpoint) for path, endpoint in routes.items()])


class ProbeServer:
    """Serves the probes on the running loop."""

    def __init__(self, host: WorkerHost) -> None:
        self._address = (address.split(host.settings.listen, "--listen")[0], host.settings.probe_port)
        config = uvicorn.Config(
            application(host),
            log_config=None,
            access_log=False,
            lifespan="off",
            timeout_graceful_shutdown=1,
        )
        self._server = uvicorn.Server(config)
        self._server.capture_signals = contextlib.nullcontext  # type: ignore[method-assign,assignment]
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> int:
        """Listen and begin; returns the port. Raises ConfigError when it is taken."""
        listener = address.bind(*self._address, host_flag="--listen", port_flag="--probe-port")
        self._task = asyncio.create_task(self._server.serve(sockets=[listener]))
        return listener.getsockname()[1]

    async def stop(self) -> None:
        self._server.should_exit = True
        if self._task:
            await asyncio.wait([self._task], timeout=3.0)
