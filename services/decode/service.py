"""Decode: one multiplexed session per router; each engine step's tokens go out as one message."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import grpc

from checkpoint.grammar import GrammarThread
from core import faults, log
from core.clock import monotonic
from core.errors import BatonError, EngineFault, InvalidParameter, Overloaded
from core.request import Request, Role, TokenDelta
from engine.matcher import Matcher
from engine.messages import Abort, Add, Event, Failed
from services.decode.checks import check
from services.decode.sources import Loader
from services.worker.host import WorkerHost
from wire import codec, status
from wire.v1 import generation_pb2 as pb
from wire.v1 import generation_pb2_grpc

_log = log.get("decode")

MAX_SESSIONS = 256
"""A router has one."""

MAX_UNSENT = 100_000
"""Deltas, and failures, kept for a router that does not read; beyond it the session is cut."""


class DecodeService(generation_pb2_grpc.DecodeServicer):
    """Sessions of all routers."""

    def __init__(self, host: WorkerHost) -> None:
        self._host = host
        self._loader = Loader(host)
        host.hub.on_load = self._loader.on_event
        self._grammar_thread = GrammarThread()
        self._warm_up()
        host.listeners.append(self._warm_up)
        self._sessions: set[_Session] = set()

    def _warm_up(self) -> None:
        """A client's first grammar should not wait for what every grammar needs."""
        if self._host.role == Role.DECODE:
            self._grammar_thread.begin(self._host.built.grammars.load)

    async def Session(
        self,
        request_iterator: AsyncIterator[pb.SessionRequest],
        context: grpc.aio.ServicerContext,
    ) -> AsyncIterator[pb.SessionReply]:
        if len(self._sessions) >= MAX_SESSIONS:
            await status.abort(context, Overloaded(f"{MAX_SESSIONS} routers have a session here already"))
        session = _Session(self._host, self._loader, self._grammar_thread)
        self._sessions.add(session)
        reader = asyncio.create_task(session.read(request_iterator))
        try:
            async for reply in session.replies():
                yield reply
        finally:
            reader.cancel()
            session.close()
            self._sessions.discard(session)

    async def close(self) -> None:
        for session in list(self._sessions):
            session.end()
        self._grammar_thread.close()
        await self._loader.close()


class _Session:
    """One router's requests on this worker."""

    def __init__(self, host: WorkerHost, loader: Loader, grammar_thread: GrammarThread) -> None:
        self._host, self._loader, self._grammar_thread = host, loader, grammar_thread
        self._open: dict[str, set[int]] = {}  # choices that go on, by request
        self._preparing: dict[str, asyncio.Task[None]] = {}
        self._unsent = pb.SessionReply()
        self._wake = asyncio.Event()
        self._ended = False

    async def read(self, messages: AsyncIterator[pb.SessionRequest]) -> None:
        """Take up what the router sends until its half of the stream ends."""
        try:
            async for message in messages:
                match message.WhichOneof("kind"):
                    case "start":
                        await self._start(message.start)
                    case "cancel":
                        self._cancel(message.cancel)
        finally:
            self.end()

    async def replies(self) -> AsyncIterator[pb.SessionReply]:
        """Everything that gathered since the last message, as one message."""
        while True:
            await self._wake.wait()
            self._wake.clear()
            reply, self._unsent = self._unsent, pb.SessionReply()
            if reply.deltas or reply.failures:
                yield reply
            if self._ended:
                return

    def end(self) -> None:
        self._ended = True
        self._wake.set()

    def close(self) -> None:
        """The stream is over: so are its requests. Idempotent."""
        for task in list(self._preparing.values()):
            task.cancel()
        for request_id in list(self._open):
            self._forget(request_id)
            self._host.built.loop.submit(Abort(request_id))

    async def _start(self, message: pb.Start) -> None:
        request_id, arrived_s = message.request_id, monotonic()
        try:
            await faults.reached("decode.start")
            self._host.require_ready()
            if len(self._preparing) >= self._host.settings.max_waiting:
                raise Overloaded(f"{len(self._preparing)} requests are being taken up already; try again")
            request = codec.request_from_wire(message)
            check(request, self._host.built.config.vocab_size)
            if not self._host.hub.register(request_id, self._on_event):
                raise InvalidParameter(f"request {request_id} is running already")
        except BatonError as error:
            self._send_failure(request_id, error)
        except Exception as error:
            self._send_failure(request_id, _not_taken_up(request_id, error))
        else:
            self._open[request_id] = set(request.open_choices)
            self._loader.expect(request)
            self._queue(request, arrived_s)

    def _queue(self, request: Request, arrived_s: float) -> None:
        """Hand it to the engine; what takes time before that is done while others go on."""
        grammar, matcher = request.sampling.grammar, None
        if grammar is not None:
            matcher = self._host.built.grammars.cached(request.sampling)
        if self._host.lookups is None and (grammar is None or matcher is not None):
            self._host.take_up(request.request_id, Add(request, matcher=matcher, arrived_s=arrived_s))
            return
        task = asyncio.create_task(self._prepare(request, matcher, arrived_s))
        self._preparing[request.request_id] = task
        task.add_done_callback(lambda _: self._preparing.pop(request.request_id, None))

    async def _prepare(self, request: Request, matcher: Matcher | None, arrived_s: float) -> None:
        """Compile a grammar that is new here, and see what the tiers hold of the prompt."""
        request_id = request.request_id
        try:
            matcher, num_held = await asyncio.gather(
                self._compiled(request, matcher), self._loader.look_up(request)
            )
        except Exception as error:
            known = error if isinstance(error, BatonError) else _not_taken_up(request_id, error)
            self._forget(request_id)
            self._send_failure(request_id, known)
        else:
            if request_id in self._open:  # not cancelled meanwhile
                self._host.take_up(request_id, Add(request, num_held, matcher, arrived_s))

    async def _compiled(self, request: Request, matcher: Matcher | None) -> Matcher | None:
        grammar, grammars = request.sampling.grammar, self._host.built.grammars
        if grammar is None or matcher is not None:
            return matcher
        return await self._grammar_thread.run(lambda: grammars.compile(request.sampling), grammar.field)

    def _cancel(self, message: pb.Cancel) -> None:
        request_id = message.request_id
        if request_id not in self._open:
            return
        if message.HasField("index") and (task := self._preparing.get(request_id)):
            # The engine does not know the request yet, so it could not end a part of it.
            task.add_done_callback(lambda _: self._cancel(message))
        elif message.HasField("index"):
            self._host.built.loop.submit(Abort(request_id, message.index))
            self._close_choice(request_id, message.index)
        else:
            if task := self._preparing.get(request_id):
                task.cancel()
            self._host.built.loop.submit(Abort(request_id))
            self._forget(request_id)

    def _on_event(self, event: Event) -> None:
        match event:
            case TokenDelta():
                self._unsent.deltas.append(codec.delta_to_wire(event))
                if event.gathered:
                    self._host.metrics.gathered(event.gathered)
                if event.finish_reason:
                    self._close_choice(event.request_id, event.index)
            case Failed(request_id, error):
                self._forget(request_id)
                self._send_failure(request_id, error)
        self._bound_unsent()
        self._wake.set()

    def _send_failure(self, request_id: str, error: BatonError) -> None:
        self._unsent.failures.append(
            pb.Failure(
                request_id=request_id,
                code=error.code or "",
                message=error.message,
                param=error.param or "",
            )
        )
        self._bound_unsent()
        self._wake.set()

    def _bound_unsent(self) -> None:
        if max(len(self._unsent.deltas), len(self._unsent.failures)) > MAX_UNSENT:
            _log.error("session.cut", reason="the router does not read what it is sent")
            self.end()

    def _close_choice(self, request_id: str, index: int) -> None:
        """Idempotent: a choice may be cancelled while its last token is on the way."""
        still_open = self._open.get(request_id, set())
        still_open.discard(index)
        if not still_open:
            self._forget(request_id)

    def _forget(self, request_id: str) -> None:
        self._open.pop(request_id, None)
        self._loader.forget(request_id)
        self._host.hub.unregister(request_id)


def _not_taken_up(request_id: str, error: Exception) -> EngineFault:
    _log.error("decode.start_failed", request_id=request_id, exc_info=error)
    return EngineFault(f"the decode worker could not take up the request ({type(error).__name__})")


def attach(host: WorkerHost, server: grpc.aio.Server) -> DecodeService:
    service = DecodeService(host)
    generation_pb2_grpc.add_DecodeServicer_to_server(service, server)
    return service
