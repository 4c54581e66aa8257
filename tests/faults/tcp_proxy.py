"""A TCP proxy whose connections can be cut, or silenced without a word."""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import Future

from services.address import free_port

CHUNK_NBYTES = 65536


class TcpProxy:
    """Passes bytes on from a port of its own to another one of the loopback, from a thread of its own."""

    def __init__(self, target_port: int) -> None:
        self._target_port = target_port
        self.port = free_port("127.0.0.1")
        self.address = f"127.0.0.1:{self.port}"
        self._loop = asyncio.new_event_loop()
        self._flows = asyncio.Event()  # bytes pass
        self._flows.set()
        self._cut = False
        self._passing: set[asyncio.Task[None]] = set()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)

    def start(self) -> None:
        self._thread.start()
        self._on_loop(asyncio.start_server(self._connected, "127.0.0.1", self.port))

    def stop(self) -> None:
        self.cut()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(5)

    def cut(self) -> None:
        """Every connection ends now, and new ones end at once."""
        self._on_loop(self._end_all())

    def silence(self) -> None:
        """Connections stay, and new ones are taken, but nothing passes any more."""
        self._loop.call_soon_threadsafe(self._flows.clear)

    def heal(self) -> None:
        """Pass everything again, also what was kept back."""
        self._cut = False
        self._loop.call_soon_threadsafe(self._flows.set)

    def _on_loop(self, work) -> None:
        done: Future[None] = asyncio.run_coroutine_threadsafe(work, self._loop)
        done.result(5)

    async def _end_all(self) -> None:
        self._cut = True
        for task in self._passing:
            task.cancel()
        if self._passing:
            await asyncio.wait(self._passing)

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task
        self._passing.add(task)
        try:
            if not self._cut:
                await self._pass_on(reader, writer)
        except (OSError, asyncio.CancelledError):
            pass
        finally:
            self._passing.discard(task)
            writer.transport.abort()

    async def _pass_on(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there, back = await asyncio.open_connection("127.0.0.1", self._target_port)
        try:
            async with asyncio.TaskGroup() as ways:
                ways.create_task(self._pipe(reader, back))
                ways.create_task(self._pipe(there, writer))
        except* OSError:
            pass
        finally:
            back.transport.abort()

    async def _pipe(self, source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
        """Until an end of it is gone, which ends the other way too."""
        while chunk := await source.read(CHUNK_NBYTES):
            await self._flows.wait()
            sink.write(chunk)
            await sink.drain()
        raise ConnectionResetError
