"""The one stream to a decode worker, shared by all requests that run there.

    start, cancel -> outbox -> writer --.                 .-- reader -> inbox of each request
                                         '-- Session RPC --'

When the stream ends, also because a message could not be understood or written, every request on it
is lost and a new stream is opened. A request that a session has lost, failed or forgotten gets nothing
more from it, whatever still comes. Nobody waits for anybody: the reader never blocks on a slow client,
whose full inbox ends its request.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import NoReturn

import grpc

from core import log
from core.errors import SOON_S, BatonError, Overloaded, PeerLost, Unavailable, WorkerLost
from core.request import Request, TokenDelta
from planning.recovery import Cause, cause_of
from services.router.bugs import reported
from wire import codec, status
from wire.v1 import generation_pb2 as gen
from wire.v1 import generation_pb2_grpc as gen_grpc

MAX_UNSENT_STARTS = 1024
MAX_UNSENT_CANCELS = 8192
WRITE_TIMEOUT_S = 10.0
INBOX_DELTAS_PER_CHOICE = 1024
FIRST_RETRY_S, LONGEST_RETRY_S = 0.05, 1.0

logger = log.get("router.session")


@dataclass(frozen=True, slots=True)
class Lost:
    """No more deltas come for this request from the worker that it was sent to. `cause`: None where another
    worker would say the same."""

    request_id: str
    error: BatonError
    cause: Cause | None


class Inbox:
    """Deltas, and ends of tries, on their way from sessions to the one task that reads them, in order;
    bounded, never blocks the writer. What arrived before a failure is read before it."""

    def __init__(self, bound: int) -> None:
        self._bound = bound
        self._items: list[TokenDelta | Lost] = []
        self._error: Exception | None = None
        self._reader: asyncio.Future[None] | None = None

    def put(self, delta: TokenDelta) -> bool:
        """False: the reader is too far behind, nothing was put. After a failure nothing is taken."""
        if self._error is not None:
            return True
        if len(self._items) >= self._bound:
            return False
        self._items.append(delta)
        self._wake()
        return True

    def lose(self, lost: Lost) -> None:
        """A try is over. Beyond the bound, since each of the reader's requests has one try at a time."""
        if self._error is None:
            self._items.append(lost)
            self._wake()

    def fail(self, error: Exception, *, at_once: bool = False) -> None:
        """Nothing more will come. The first error stands; `at_once` drops what was not read."""
        self._error = self._error or error
        if at_once:
            self._items.clear()
        self._wake()

    async def get(self, timeout_s: float | None = None) -> list[TokenDelta | Lost]:
        """All that has arrived, at least one; [] after `timeout_s`. Raises the error once that was read."""
        if not (self._items or self._error):
            self._reader = asyncio.get_running_loop().create_future()
            if timeout_s is None:
                await self._reader
            elif not (await asyncio.wait([self._reader], timeout=timeout_s))[0]:
                return []
        if not self._items:
            assert self._error is not None
            raise self._error
        items, self._items = self._items, []
        return items

    def _wake(self) -> None:
        if self._reader is not None and not self._reader.done():
            self._reader.set_result(None)


class Session:
    """Requests on one decode worker. `up`: a stream is open, or being opened; `tell` is told of that.
    `count_fault` is told of streams that ended for a reason which nobody foresaw."""

    def __init__(
        self,
        worker_id: str,
        channel: grpc.aio.Channel,
        count_fault: Callable[[str], None],
        tell: Callable[[bool], None],
    ) -> None:
        self.worker_id = worker_id
        self.up = False
        self._tell = tell
        self._count_fault = count_fault
        self._heard = False  # whether the worker has said anything on the present stream
        self._stub = gen_grpc.DecodeStub(channel)
        self._inboxes: dict[str, Inbox] = {}
        self._unsent: dict[str, gen.SessionRequest] = {}  # starts, in order
        self._cancels: deque[gen.SessionRequest] = deque()
        self._wake = asyncio.Event()

    def start(self, request: Request, inbox: Inbox) -> None:
        """Queue a request; its deltas go to `inbox`. Raises Unavailable or Overloaded."""
        if not self.up:
            raise Unavailable(
                f"decode worker {self.worker_id} is not connected; try again", retry_after_s=SOON_S
            )
        # A cancel is never refused; as long as too many wait, no more can be caused.
        if len(self._unsent) >= MAX_UNSENT_STARTS or len(self._cancels) >= MAX_UNSENT_CANCELS:
            raise Overloaded(f"decode worker {self.worker_id} takes no more requests now; try again")
        self._inboxes[request.request_id] = inbox
        self._unsent[request.request_id] = gen.SessionRequest(start=codec.request_to_wire(request))
        self._wake.set()

    def cancel(self, request_id: str, index: int | None = None) -> None:
        """End one choice, or the request. Idempotent; a request that is over is left alone."""
        if request_id not in self._inboxes:
            return
        if index is None:
            self.forget(request_id)
            if self._unsent.pop(request_id, None) is not None:
                return
        self._cancels.append(gen.SessionRequest(cancel=gen.Cancel(request_id=request_id, index=index)))
        self._wake.set()

    def forget(self, request_id: str) -> None:
        """All choices of a request have finished."""
        self._inboxes.pop(request_id, None)

    def abandon(self, reason: str) -> None:
        """The worker answers no more: its requests are lost here, and cancelled there if it ever goes on."""
        for request_id, inbox in list(self._inboxes.items()):
            self.cancel(request_id)
            inbox.lose(Lost(request_id, WorkerLost(reason), Cause.SILENT))

    async def run(self, reachable: asyncio.Event) -> None:
        """Keep the stream open whenever the worker is `reachable`, until cancelled."""
        retry_s = FIRST_RETRY_S
        while True:
            await reachable.wait()
            self._went(True)
            cause = Cause.LEFT  # also where nobody looks for its address any more
            try:
                ended = await self._stream()
                cause = Cause.LEFT if isinstance(ended, (Unavailable, Overloaded)) else Cause.DIED
            finally:
                self._went(False)
                self._drop_all(cause)
            logger.warning("session.lost", worker=self.worker_id, reason=ended.message)
            retry_s = FIRST_RETRY_S if self._heard else min(2 * retry_s, LONGEST_RETRY_S)
            await asyncio.sleep(retry_s)

    def _went(self, up: bool) -> None:
        self.up = up
        self._tell(up)

    async def _stream(self) -> BatonError:
        """One stream, to its end; returns why it ended: Unavailable, Overloaded where the worker chose it."""
        call = self._stub.Session()
        self._heard, ended = False, PeerLost("the stream was closed")
        try:
            async with asyncio.TaskGroup() as ends:
                ends.create_task(self._read(call))
                ends.create_task(self._write(call))
        except* Exception as errors:
            ended = self._known(errors.exceptions[0])
        finally:
            call.cancel()
        return ended

    def _known(self, error: BaseException) -> BatonError:
        if isinstance(error, BatonError):
            return error
        self._count_fault("session")
        return reported(error)

    async def _read(self, call: grpc.aio.StreamStreamCall) -> NoReturn:
        """Raises what ended the stream."""
        try:
            async for reply in call:
                self._heard = True
                self._dispatch(reply)
        except grpc.aio.AioRpcError as error:
            raise status.from_rpc(error, self.worker_id) from None
        raise Unavailable("the worker ended the stream")

    def _drop_all(self, cause: Cause) -> None:
        lost = WorkerLost(f"decode worker {self.worker_id} was lost while it held the request; send it again")
        for request_id, inbox in self._inboxes.items():
            inbox.lose(Lost(request_id, lost, cause))
        self._inboxes.clear()
        self._unsent.clear()
        self._cancels.clear()

    async def _write(self, call: grpc.aio.StreamStreamCall) -> None:
        """Starts before cancels: a cancel never overtakes the start it is for."""
        try:
            while True:
                await self._wake.wait()
                self._wake.clear()
                while self._unsent or self._cancels:
                    if self._unsent:
                        request_id = next(iter(self._unsent))
                        message = self._unsent.pop(request_id)
                    else:
                        message = self._cancels.popleft()
                    async with asyncio.timeout(WRITE_TIMEOUT_S):
                        await call.write(message)
        except TimeoutError:
            raise PeerLost(f"{self.worker_id} has read nothing for {WRITE_TIMEOUT_S:g} s") from None
        except (grpc.aio.AioRpcError, asyncio.InvalidStateError):
            return  # the reader sees the same end and reports it

    def _dispatch(self, reply: gen.SessionReply) -> None:
        for message in reply.deltas:
            inbox = self._inboxes.get(message.request_id)
            if inbox is not None and not inbox.put(codec.delta_from_wire(message)):
                self.cancel(message.request_id)
                inbox.fail(Overloaded("the client reads more slowly than tokens are made; read faster"))
        for failure in reply.failures:
            inbox = self._inboxes.pop(failure.request_id, None)
            if inbox is not None:
                error = status.rebuild(failure.code, failure.message, failure.param or None)
                inbox.lose(Lost(failure.request_id, error, cause_of(error)))
