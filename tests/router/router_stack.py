"""A whole router on a real socket, in this process, with fake workers behind it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass

import httpx
import openai
from router_fakes import FakeWorker

from core.settings import Settings
from services.discovery import StaticDiscovery
from services.router.app import create_app
from services.router.fleet import Fleet
from services.router.https import HTTPS
from services.router.main import _make_server, listen
from services.router.router import Router
from services.router.text import TextSide
from wire.channel import Identity


@dataclass
class Stack:
    """A router on a real socket with fake workers behind it."""

    router: Router
    workers: list[FakeWorker]
    url: str
    client: openai.AsyncOpenAI
    http: httpx.AsyncClient

    @property
    def worker(self) -> FakeWorker:
        return self.workers[0]

    @property
    def model(self) -> str:
        assert self.router.text is not None
        return self.router.text.name

    async def until(self, condition: Callable[[], bool], seconds: float = 5.0) -> None:
        async with asyncio.timeout(seconds):
            while not condition():
                await asyncio.sleep(0.01)

    def up(self) -> int:
        """Decode workers that take requests now."""
        assert self.router.fleet is not None
        return len(self.router.fleet.view().decode)

    def states(self) -> dict[str, str]:
        assert self.router.fleet is not None
        return {member.worker_id: state.value for member, state, _ in self.router.fleet.workers()}


@asynccontextmanager
async def stacked(
    text: TextSide, workers: list[FakeWorker], *, wait: bool = True, key: str = "", **settings: object
) -> AsyncIterator[Stack]:
    router = Router(Settings(api_key=key, **settings))  # type: ignore[arg-type]
    addresses = tuple([await worker.start() for worker in workers])
    router.text = text
    silence_s = router.settings.step_timeout_s
    found = StaticDiscovery(addresses)
    router.fleet = Fleet(
        found,
        text.tokenizer_digest,
        silence_s,
        router.metrics.count_fault,
        identity=Identity.of(router.settings),
    )
    following = asyncio.create_task(router.fleet.run())
    server = _make_server(create_app(router), HTTPS(router.settings))
    with listen("127.0.0.1", 0) as listener:
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        serving = asyncio.create_task(server._serve([listener]))
        client = openai.AsyncOpenAI(base_url=f"{url}/v1", api_key=key or "none", max_retries=0, timeout=20)
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        async with httpx.AsyncClient(base_url=url, timeout=20, headers=headers) as http:
            stack = Stack(router, workers, url, client, http)
            try:
                if wait:
                    await stack.until(lambda: set(stack.states().values()) == {"ready"})
                yield stack
            finally:
                await client.close()
                server.should_exit = server.force_exit = True
                await serving
                following.cancel()
                await asyncio.gather(following, return_exceptions=True)
                for worker in workers:
                    await worker.stop()
