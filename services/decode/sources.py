"""Loads: what the engine's pool lacks, brought from wherever that is cheapest.

    block 0 of the order          t          a                            n
    |=== tiers bring these =======|--- gap --|=== a prefill worker these =|

Tiers and prefill worker bring their parts at the same time. Whatever goes wrong is a miss: the gap that
a tier leaves is asked of the prefill worker afterwards, which has these blocks by then, and what does
not come at all the engine computes. It gets exactly one LoadFinished.
"""

from __future__ import annotations

import asyncio

from core import log
from core.blocks import num_shareable_blocks
from core.errors import SourceFailed
from core.request import Request
from engine.messages import BlocksArrived, Event, LoadCancelled, LoadFinished, LoadOrdered, Quiet
from kvtransfer.ledger import Ledger
from kvtransfer.puller import Puller
from kvtransfer.tier_stack import Held
from planning.price import CALL_S, HARM, STREAMS_TO_COME
from planning.sources import Decision, LocalPrice, PrefillPrice, Prompt, TierPrice, decide
from services.decode.load import Load
from services.decode.remote import PrefillSource
from services.worker.host import WorkerHost
from services.worker.tiers import Lookups

_log = log.get("decode")


class Loader:
    """All loads of one worker, of its requests and of its prefill jobs."""

    def __init__(self, host: WorkerHost) -> None:
        self._host = host
        self._ledger = Ledger(lambda block_ids: host.built.loop.submit(Quiet(tuple(block_ids))))
        self._puller = Puller(self._ledger)
        self._prefill = PrefillSource(host, self._puller)
        self._requests: dict[str, Request] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}

    @property
    def _lookups(self) -> Lookups | None:
        return self._host.lookups

    async def look_up(self, request: Request) -> int:
        """How many leading blocks of what its choices begin from the tiers hold."""
        if self._lookups is None or request.sampling.prompt_logprobs:
            return 0
        tokens, size = request.common_tokens, self._host.built.fingerprint.block_size
        count = num_shareable_blocks(len(tokens), size)
        return await self._lookups.look_up(request.request_id, tokens, count, request.cache_salt)

    def expect(self, request: Request) -> None:
        """A request that loads may be ordered for, until `forget`."""
        self._requests[request.request_id] = request

    def forget(self, request_id: str) -> None:
        """Idempotent; a load that runs goes on until the engine cancels it."""
        self._requests.pop(request_id, None)
        if self._lookups:
            self._lookups.forget(request_id)

    def on_event(self, event: Event) -> None:
        """Takes LoadOrdered and LoadCancelled."""
        if isinstance(event, LoadOrdered):
            size = self._host.built.fingerprint.block_size
            load = Load(event, self._requests.get(event.request_id), size)
            task = asyncio.create_task(self._load(load))
            self._tasks[event.load_id] = task
            # A callback, since a task that is cancelled before its first turn never enters its body.
            task.add_done_callback(lambda _: self._finish(load))
        elif isinstance(event, LoadCancelled) and (task := self._tasks.get(event.load_id)):
            task.cancel()

    async def close(self) -> None:
        for task in list(self._tasks.values()):
            task.cancel()
        await asyncio.gather(*self._tasks.values(), return_exceptions=True)
        await asyncio.sleep(0)  # the callbacks of the tasks
        await self._prefill.close()
        self._puller.stop()
        await asyncio.to_thread(self._puller.close)

    # ---- one load

    async def _load(self, load: Load) -> None:
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

    async def _run(self, load: Load) -> None:
        held = await self._lookups.found(load.order) if self._lookups else []
        load.choose(self._decide(load, held))
        asking = None
        if ask := load.ask():
            asking = asyncio.create_task(self._prefill.bring(ask, load.brought, lambda: self._moved(load)))
        try:
            await self._take(load, held)
            if asking:
                await asking
            if gap := load.ask_for_gap():
                await self._prefill.bring(gap, load.gap, lambda: self._moved(load))
        finally:
            if asking:
                asking.cancel()
                await asyncio.gather(asking, return_exceptions=True)

    def _decide(self, load: Load, held: list[Held]) -> Decision:
        """Every way to these blocks, priced by what was measured."""
        nbytes = self._host.built.ranks.block_nbytes
        prompt = load.prompt(nbytes)
        tokens_per_s = self._tokens_per_s(prompt)
        tiers = []
        for each in held:
            assert self._lookups
            rate = self._lookups.stack.rate(each.source)
            waiting_s = rate.latency_s + rate.queued_nbytes / rate.nbytes_per_s
            tiers.append(TierPrice(each.source, each.count, waiting_s, nbytes / rate.nbytes_per_s))
        prefill = None
        if target := load.target:
            theirs = 1 / target.token_s if target.token_s else tokens_per_s
            link = self._host.links.rate(target.incarnation)
            prefill = PrefillPrice(theirs, link, CALL_S + target.queue_s, target.cached_blocks)
        streams = self._host.built.loop.stats.running + STREAMS_TO_COME
        return decide(prompt, tiers, LocalPrice(tokens_per_s, harm=HARM * streams), prefill)

    def _tokens_per_s(self, prompt: Prompt) -> float:
        """Of computing here what the pool lacks of this prompt, beside what runs."""
        built = self._host.built
        stats, before = built.loop.stats, prompt.first_block * prompt.block_size
        model = stats.prefill_model.beside(stats.decode_model, stats.running, stats.context_tokens)
        tokens = prompt.num_tokens - before
        return tokens / model.prompt_seconds(tokens, before, built.limits.max_num_batched_tokens)

    async def _take(self, load: Load, held: list[Held]) -> None:
        """Load the chosen segments, in order, up to the first that comes short."""
        lookups, order = self._lookups, load.order
        for segment, (source, count) in zip(held, load.loads, strict=False):
            assert lookups
            place = slice(segment.first, segment.first + count)

            def arrived(done: int, source: str = source, before: int = segment.first) -> None:
                load.took(source, before, done)
                self._moved(load)

            done = await lookups.stack.load(
                source,
                order.hashes[place],
                order.block_ids[place],
                arrived,
                lookups.block_budget_s,
                is_use=not order.parked,
            )
            if done < count:
                break

    def _moved(self, load: Load) -> None:
        arrived = BlocksArrived(load.order.load_id, load.arrived, load.num_from_tiers)
        self._host.built.loop.submit(arrived)

    def _failed(self, load: Load, error: SourceFailed) -> None:
        load.error = f"{error.code}: {error.message}"
        self._host.metrics.transfer_failed(error.code or "unknown")
        peer = load.target.worker_id if load.target else None
        _log.warning("load.failed", request_id=load.order.request_id, peer=peer, reason=load.error)

    def _finish(self, load: Load) -> None:
        """However the load ended, the engine hears of it once, with the blocks that are not quiet yet."""
        order = load.order
        self._tasks.pop(order.load_id, None)
        quiet = set(self._ledger.release(order.load_id, order.block_ids))
        unquiet = tuple(block_id for block_id in order.block_ids if block_id not in quiet)
        self._host.built.loop.submit(LoadFinished(order.load_id, load.report(unquiet)))
        self._host.metrics.loaded(load.label)
        for part in (load.brought, load.gap):
            if part.nbytes:
                assert load.target
                self._host.links.pulled(load.target.incarnation, part.nbytes, part.transfer_s)
                self._host.metrics.transferred(part.nbytes, part.transfer_s)
