"""A decode or prefill worker as the router sees one: real gRPC, scripted tokens, faults on demand."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Callable, Sequence

import grpc

from core.errors import BatonError
from core.kv import Fingerprint
from core.request import FinishReason, Gathered, Request, TokenDelta, TokenLogprob
from wire import channel, codec
from wire.v1 import generation_pb2 as gen
from wire.v1 import generation_pb2_grpc as gen_grpc
from wire.v1 import worker_pb2 as pb
from wire.v1 import worker_pb2_grpc as pb_grpc

Script = Callable[[Request], AsyncIterator[TokenDelta]]
EOS = 2
_incarnations = itertools.count(1)


def fingerprint(digest: str, **changes: object) -> Fingerprint:
    fields = {
        "model_digest": "m",
        "tokenizer_digest": digest,
        "num_layers": 30,
        "num_kv_heads": 3,
        "head_dim": 64,
        "block_size": 16,
        "kv_dtype": "fp32",
        "rope": "default/100000",
        "max_model_len": 8192,
    }
    return Fingerprint(**(fields | changes))  # type: ignore[arg-type]


def logprob(token_id: int, k: int) -> TokenLogprob:
    return TokenLogprob(token_id, -0.5, tuple((token_id + i, -0.5 - i) for i in range(k)))


def says(
    ids: Sequence[int],
    *,
    finish: FinishReason = FinishReason.STOP,
    delay_s: float = 0.0,
    fail_at: int | None = None,
    error: BatonError | None = None,
    gathered: Gathered | None = None,
) -> Script:
    """Every choice says `ids` up to its limit; a STOP finish appends the end token.

    At step `fail_at` the script raises `error`. Like the real worker it ends at a stop token, and goes on from
    the tokens that a choice has.
    """

    async def script(request: Request) -> AsyncIterator[TokenDelta]:
        s = request.sampling
        ids_here = [*ids, EOS] if finish is FinishReason.STOP else list(ids)
        begun = dict(request.resumed) or dict.fromkeys(range(s.n), ())
        assert all(list(got) == ids_here[: len(got)] for got in begun.values()), "tokens of another answer"
        first = 0 if not request.resumed else None
        for step, token_id in enumerate(ids_here):
            if step < min(map(len, begun.values())):
                continue
            if step == fail_at and error is not None:
                raise error
            if delay_s:
                await asyncio.sleep(delay_s)
            ends = step + 1 >= s.min_tokens and token_id in s.stop_token_ids
            reason = FinishReason.STOP if ends else None
            if reason is None and step + 1 == min(s.max_tokens, len(ids_here)):
                reason = FinishReason.LENGTH
            for index in [index for index, got in begun.items() if step >= len(got)]:
                yield TokenDelta(
                    request.request_id,
                    index,
                    (token_id,),
                    () if s.logprobs is None else (logprob(token_id, s.logprobs),),
                    reason,
                    (gathered or Gathered(computed_tokens=len(request.prompt_token_ids)))
                    if (step, index) == (first, 0)
                    else None,
                    tuple(
                        None if i == 0 else logprob(t, s.logprobs or 0)
                        for i, t in enumerate(request.prompt_token_ids)
                    )
                    if s.prompt_logprobs and (step, index) == (first, 0)
                    else (),
                )
            if reason is not None:
                return

    return script


class FakeWorker(pb_grpc.WorkerServicer, gen_grpc.DecodeServicer):
    """`starts` and `cancels` are what arrived; `open` the requests that run."""

    def __init__(
        self,
        print_: Fingerprint,
        script: Script | None = None,
        *,
        worker_id: str = "decode-0",
        role: str = "decode",
        total_blocks: int = 512,
        max_num_seqs: int = 0,
    ) -> None:
        self.script = script or says([504, 1195])
        self.starts: list[Request] = []
        self.cancels: list[tuple[str, int | None]] = []
        self.open: dict[str, asyncio.Task[None]] = {}
        self.print = print_
        self.state = pb.State(phase="ready", free_blocks=total_blocks)
        self.watches = 0
        self._news: pb.KvEvents | None = None
        self._replies: asyncio.Queue[gen.SessionReply] | None = None
        self._worker_id, self._role, self._total_blocks = worker_id, role, total_blocks
        self._max_num_seqs = max_num_seqs
        self._changed = asyncio.Event()
        self._server: grpc.aio.Server | None = None
        self.address = "127.0.0.1:0"
        self.identity = channel.OPEN

    async def start(self) -> str:
        self._server = channel.server(self.identity)
        pb_grpc.add_WorkerServicer_to_server(self, self._server)
        gen_grpc.add_DecodeServicer_to_server(self, self._server)
        port = channel.listen(self._server, self.address, self.identity)
        self.address = f"127.0.0.1:{port}"
        self.incarnation = f"life-{next(_incarnations)}"
        await self._server.start()
        return self.address

    async def stop(self) -> None:
        if self._server is not None:
            await self._server.stop(None)
            self._server = None

    def change(self, **state: object) -> None:
        self.state.MergeFrom(pb.State(**state))  # type: ignore[arg-type]
        self._changed.set()
        self._changed = asyncio.Event()

    def tell(self, news: pb.KvEvents) -> None:
        """Say this of its blocks, again with every State: the same news twice change nothing."""
        self._news = news
        self.change()

    def become(self, role: str) -> None:
        """The worker changes its role: another Hello with the same incarnation."""
        self._role = role
        self.change()

    def _hello(self) -> pb.Hello:
        return pb.Hello(
            worker_id=self._worker_id,
            incarnation=self.incarnation,
            role=self._role,
            fingerprint=codec.fingerprint_to_wire(self.print),
            host="here",
            pid=1,
            address=self.address,
            total_blocks=self._total_blocks,
            max_num_seqs=self._max_num_seqs,
            transports=["shm"],
        )

    async def Watch(self, request, context):
        self.watches += 1
        told = ""
        while True:
            changed = self._changed
            if self._role != told:
                told = self._role
                yield pb.WatchEvent(hello=self._hello())
            yield pb.WatchEvent(state=self.state)
            if self._news is not None:
                yield pb.WatchEvent(kv=self._news)
            try:
                async with asyncio.timeout(0.5):
                    await changed.wait()
            except TimeoutError:
                pass

    def say(self, *deltas: TokenDelta) -> None:
        """In one message on the present session, whether it was asked for or not."""
        assert self._replies is not None
        self._replies.put_nowait(gen.SessionReply(deltas=map(codec.delta_to_wire, deltas)))

    async def Session(self, request_iterator, context):
        self._replies = replies = asyncio.Queue[gen.SessionReply]()
        reader = asyncio.create_task(self._read(request_iterator, replies))
        try:
            while True:
                yield await replies.get()
        finally:
            reader.cancel()
            for task in self.open.values():
                task.cancel()

    async def _read(self, messages, replies) -> None:
        async for message in messages:
            if message.WhichOneof("kind") == "start":
                request = codec.request_from_wire(message.start)
                self.starts.append(request)
                task = asyncio.create_task(self._play(request, replies))
                self.open[request.request_id] = task
                task.add_done_callback(lambda _, rid=request.request_id: self.open.pop(rid, None))
            else:
                cancel = message.cancel
                index = cancel.index if cancel.HasField("index") else None
                self.cancels.append((cancel.request_id, index))
                if index is None and cancel.request_id in self.open:
                    self.open[cancel.request_id].cancel()

    async def _play(self, request: Request, replies) -> None:
        try:
            async for delta in self.script(request):
                if (request.request_id, delta.index) not in self.cancels:
                    replies.put_nowait(gen.SessionReply(deltas=[codec.delta_to_wire(delta)]))
                await asyncio.sleep(0)
        except BatonError as error:
            failure = gen.Failure(
                request_id=request.request_id, code=error.code, message=error.message, param=error.param or ""
            )
            replies.put_nowait(gen.SessionReply(failures=[failure]))
