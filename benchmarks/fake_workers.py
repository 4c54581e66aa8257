"""Workers that only speak the protocol, in a process of their own: they say one token again and again, in
steps as a real one, and remember when each was sent.

What is measured with them is the router and nothing else.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any

import uvloop

from core.kv import Fingerprint
from wire import channel, codec
from wire.v1 import generation_pb2 as gen
from wire.v1 import generation_pb2_grpc as gen_grpc
from wire.v1 import worker_pb2 as pb
from wire.v1 import worker_pb2_grpc as pb_grpc

TOKEN_ID, TOKEN_TEXT = 260, " the"
"""Of the embedded model's tokenizer."""

MAX_NUM_SEQS = 512
STATE_EVERY_S = 0.1
START_S = 30.0


@dataclass(slots=True)
class Course:
    """Of one request: when it came, and when each of its tokens was sent, in `time.perf_counter()`, which is
    the same clock in every process of a host."""

    began_at: float
    sent_at: list[float] = field(default_factory=list)


@dataclass(slots=True)
class _Pace:
    """`step_s`: between the steps of each worker; all workers' steps are spread over it evenly."""

    step_s: float = 0.01


class _Worker(pb_grpc.WorkerServicer, gen_grpc.DecodeServicer):
    def __init__(self, role: str, number: int, share: float, print_: Fingerprint, pace: _Pace) -> None:
        self.courses: dict[str, Course] = {}
        self._role, self._number, self._share = role, number, share
        self._print, self._pace = print_, pace
        self._left: dict[str, int] = {}  # tokens to come
        self._taken: list[str] = []
        self._wake = asyncio.Event()
        self._server = channel.server()
        pb_grpc.add_WorkerServicer_to_server(self, self._server)
        gen_grpc.add_DecodeServicer_to_server(self, self._server)
        self.address = f"127.0.0.1:{channel.listen(self._server, '127.0.0.1:0')}"

    async def start(self) -> None:
        await self._server.start()

    async def Watch(self, request: pb.WatchRequest, context: object) -> AsyncIterator[pb.WatchEvent]:
        name = f"{self._role}-{self._number}"
        hello = pb.Hello(
            worker_id=name,
            incarnation=f"life-of-{name}",
            role=self._role,
            fingerprint=codec.fingerprint_to_wire(self._print),
            address=self.address,
            total_blocks=2**20,
            transports=["shm"],
            max_num_seqs=MAX_NUM_SEQS,
            max_num_batched_tokens=256,
        )
        yield pb.WatchEvent(hello=hello)
        prefill_model = pb.StepModel(a=0.01, b=0.001, c=1e-7, num_steps=1000)
        decode_model = pb.StepModel(a=0.01, b=0.001, c=1e-6, num_steps=1000)
        while True:
            yield pb.WatchEvent(
                state=pb.State(
                    phase="ready",
                    free_blocks=2**20,
                    running=len(self._left),
                    taken=self._taken,
                    prefill_model=prefill_model,
                    decode_model=decode_model,
                )
            )
            self._taken.clear()  # of one router's stream
            await asyncio.sleep(STATE_EVERY_S)

    async def Session(
        self, request_iterator: AsyncIterator[gen.SessionRequest], context: object
    ) -> AsyncIterator[gen.SessionReply]:
        reader = asyncio.create_task(self._read(request_iterator))
        try:
            while True:
                await self._wake.wait()
                await self._until_step()
                yield self._step()
        finally:
            reader.cancel()

    async def _read(self, messages: AsyncIterator[gen.SessionRequest]) -> None:
        async for message in messages:
            if message.HasField("start"):
                request_id = message.start.request_id
                self._taken.append(request_id)
                self.courses[request_id] = Course(time.perf_counter())
                self._left[request_id] = message.start.sampling.max_tokens
                self._wake.set()
            else:
                self._left.pop(message.cancel.request_id, None)

    async def _until_step(self) -> None:
        step_s = self._pace.step_s
        phase = time.perf_counter() / step_s - self._share
        await asyncio.sleep((1 - phase % 1) * step_s)

    def _step(self) -> gen.SessionReply:
        reply = gen.SessionReply()
        for request_id, left in list(self._left.items()):
            finish = "" if left > 1 else "length"
            gathered = gen.Gathered() if not self.courses[request_id].sent_at else None
            reply.deltas.add(
                request_id=request_id, token_ids=(TOKEN_ID,), finish_reason=finish, gathered=gathered
            )
            if finish:
                del self._left[request_id]
            else:
                self._left[request_id] = left - 1
        if not self._left:
            self._wake.clear()
        now = time.perf_counter()
        for delta in reply.deltas:
            self.courses[delta.request_id].sent_at.append(now)
        return reply


class FakeWorkers:
    """The other end: addresses, and what they are told."""

    def __init__(self, pipe: Connection) -> None:
        self._pipe = pipe
        self.addresses: list[str] = self._answer()

    def set_pace(self, step_s: float) -> None:
        self._pipe.send(("pace", step_s))
        self._answer()

    def courses(self) -> dict[str, Course]:
        """Of all requests since this was asked last, by their ids at the router (those of answers, without
        `cmpl-`)."""
        self._pipe.send(("courses", 0.0))
        return {name.rpartition("-")[0]: course for name, course in self._answer().items()}

    def _answer(self) -> Any:
        if not self._pipe.poll(START_S):
            raise SystemExit("the fake workers do not answer; see what they printed above")
        return self._pipe.recv()


@contextmanager
def fake_workers(num_prefill: int, num_decode: int, print_: Fingerprint) -> Iterator[FakeWorkers]:
    """So many workers in one process, which ends with the block."""
    spawn = multiprocessing.get_context("spawn")
    ours, theirs = spawn.Pipe()
    process = spawn.Process(target=_serve, args=(theirs, num_prefill, num_decode, print_), daemon=True)
    process.start()
    try:
        yield FakeWorkers(ours)
    finally:
        process.terminate()
        process.join(5.0)


def _serve(pipe: Connection, num_prefill: int, num_decode: int, print_: Fingerprint) -> None:
    uvloop.run(_run(pipe, num_prefill, num_decode, print_))


async def _run(pipe: Connection, num_prefill: int, num_decode: int, print_: Fingerprint) -> None:
    pace = _Pace()
    workers = [_Worker("decode", i, i / num_decode, print_, pace) for i in range(num_decode)]
    workers += [_Worker("prefill", i, 0.0, print_, pace) for i in range(num_prefill)]
    for worker in workers:
        await worker.start()
    pipe.send([worker.address for worker in workers])
    while True:
        kind, value = await asyncio.to_thread(
            pipe.recv
        )  # the loop must not see it: it would not block any more
        if kind == "pace":
            pace.step_s, answer = value, {}
        else:
            answer = {name: course for worker in workers for name, course in worker.courses.items()}
            for worker in workers:
                worker.courses.clear()
        await asyncio.to_thread(pipe.send, answer)
