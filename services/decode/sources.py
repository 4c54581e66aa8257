"""Loads: what the engine's pool lacks, brought from wherever it is.

Whatever goes wrong here is a miss: the engine gets exactly one LoadFinished and computes the rest.
"""

from __future__ import annotations

import asyncio

from core import log
from core.errors import SourceFailed
from core.request import Request
from engine.messages import BlocksArrived, Event, LoadCancelled, LoadFinished, LoadOrdered, LoadReport, Quiet
from kvtransfer.ledger import Ledger
from kvtransfer.puller import Puller
from services.decode.remote import Ask, Brought, PrefillSource
from services.worker.host import WorkerHost

_log = log.get("decode")


class Loader:
    """All loads of one worker."""

    def __init__(self, host: WorkerHost) -> None:
        self._host = host
        self._ledger = Ledger(lambda block_ids: host.built.loop.submit(Quiet(tuple(block_ids))))
        self._puller = Puller(self._ledger)
        self._prefill = PrefillSource(host, self._puller)
        self._requests: dict[str, Request] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}

    def expect(self, request: Request) -> None:
        """A request that loads may be ordered for, until `forget`."""
        self._requests[request.request_id] = request

    def forget(self, request_id: str) -> None:
        """Idempotent; a load that runs goes on until the engine cancels it."""
        self._requests.pop(request_id, None)

    def on_event(self, event: Event) -> None:
        """Takes LoadOrdered and LoadCancelled."""
        if isinstance(event, LoadOrdered):
            load = _Load(event, self._requests.get(event.request_id))
            task = asyncio.create_task(self._load(load))
            self._tasks[event.request_id] = task
            # A callback, since a task that is cancelled before its first turn never enters its body.
            task.add_done_callback(lambda _: self._finish(load))
        elif isinstance(event, LoadCancelled) and (task := self._tasks.get(event.request_id)):
            task.cancel()

    async def close(self) -> None:
        for task in list(self._tasks.values()):
            task.cancel()
        await asyncio.gather(*self._tasks.values(), return_exceptions=True)
        await asyncio.sleep(0)  # the callbacks of the tasks
        await self._prefill.close()
        self._puller.stop()
        await asyncio.to_thread(self._puller.close)

    async def _load(self, load: _Load) -> None:
        try:
            async with asyncio.timeout(self._host.settings.request_timeout_s):
                await self._run(load)
        except SourceFailed as error:
            self._failed(load, error)
        except TimeoutError:
            self._failed(load, SourceFailed("the load took longer than a request may"))
        except Exception as error:  # a fault of ours must not strand the blocks
            _log.error("load.broke", request_id=load.order.request_id, exc_info=error)
            self._failed(load, SourceFailed(f"{type(error).__name__} while loading"))

    async def _run(self, load: _Load) -> None:
        if ask := load.ask(self._host.built.fingerprint.block_size):
            await self._prefill.bring(ask, load.brought, lambda: self._arrived(load))

    def _arrived(self, load: _Load) -> None:
        self._host.built.loop.submit(BlocksArrived(load.order.request_id, load.brought.blocks))

    def _failed(self, load: _Load, error: SourceFailed) -> None:
        load.error = f"{error.code}: {error.message}"
        self._host.metrics.transfer_failed(error.code or "unknown")
        _log.warning("load.failed", request_id=load.order.request_id, reason=load.error)

    def _finish(self, load: _Load) -> None:
        """However the load ended, the engine hears of it once, with the blocks that are not quiet yet."""
        order = load.order
        self._tasks.pop(order.request_id, None)
        quiet = set(self._ledger.release(order.request_id, order.block_ids))
        unquiet = tuple(block_id for block_id in order.block_ids if block_id not in quiet)
        self._host.built.loop.submit(LoadFinished(order.request_id, load.report(unquiet)))
        if load.brought.nbytes:
            self._host.metrics.transferred(load.brought.nbytes, load.brought.transfer_s)


class _Load:
    """One order, whose request is known unless it is a prefill job's or its client has left."""

    def __init__(self, order: LoadOrdered, request: Request | None) -> None:
        self.order, self.request = order, request
        self.brought = Brought()
        self.error = ""

    def ask(self, block_size: int) -> Ask | None:
        """What to ask the prefill worker for that the plan names, if it names one."""
        order, request = self.order, self.request
        if request is None or request.prefill is None:
            return None
        until = order.first_block + len(order.block_ids)
        return Ask(
            order.request_id,
            request.prefill,
            request.prompt_token_ids[: until * block_size],
            request.cache_salt,
            request.epoch,
            order.first_block,
            order.block_ids,
        )

    def report(self, unquiet: tuple[int, ...]) -> LoadReport:
        brought = self.brought
        return LoadReport(
            arrived=brought.blocks,
            remote_cached_blocks=brought.cached_blocks,
            nbytes=brought.nbytes,
            transfer_s=brought.transfer_s,
            exposed_s=brought.exposed_s,
            last_block_at=brought.last_block_at,
            error=self.error,
            unquiet=unquiet,
        )
