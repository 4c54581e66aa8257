"""Workers of their own for a benchmark, driven over gRPC without a router in between."""

from __future__ import annotations

import asyncio
import itertools
import os
import signal
import time
import uuid
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass

import grpc

from core.request import Gathered, PrefillTarget, Request, SamplingParams
from core.settings import Settings
from services.address import free_port
from services.children import Child, child_flags, secret_environment
from services.worker.cpu import format_cores, split_cores
from wire import channel, codec
from wire.v1 import generation_pb2 as pb
from wire.v1 import generation_pb2_grpc, worker_pb2, worker_pb2_grpc


def start_workers(
    stack: ExitStack, roles: Sequence[str], settings: Settings, cores: Sequence[int] = ()
) -> list[Child]:
    """One worker per role, each on its own share of `cores`, without them of all that this process may use;
    ended with the stack."""
    children = []
    shares = split_cores(sorted(cores or os.sched_getaffinity(0)), len(roles))
    for i, (role, share) in enumerate(zip(roles, shares, strict=True)):
        port, probe_port = free_port("127.0.0.1"), free_port("127.0.0.1")
        flags = child_flags(
            settings,
            worker_id=f"{role}-{i}",
            listen=f"127.0.0.1:{port}",
            probe_port=probe_port,
            cpu_affinity=format_cores(share),
        )
        probe = f"http://127.0.0.1:{probe_port}/ready"
        child = Child(f"{role}-{i}", [role, *flags], probe, f"127.0.0.1:{port}", secret_environment(settings))
        child.start()
        stack.callback(child.wait, 15.0)
        stack.callback(child.send, signal.SIGTERM)
        children.append(child)
    deadline = time.monotonic() + 120
    while not all(child.probe() and child.ready for child in children):
        if time.monotonic() > deadline or any(child.exit_status() is not None for child in children):
            why = "; ".join(child.last_words for child in children if child.last_words)
            raise SystemExit(f"a worker did not become ready: {why or 'see its log above'}")
        time.sleep(0.1)
    return children


async def target_of(worker: Child) -> PrefillTarget:
    """The worker as a plan names it."""
    async with channel.connect(worker.address) as open_channel:
        watch = worker_pb2_grpc.WorkerStub(open_channel).Watch(worker_pb2.WatchRequest())
        hello = (await watch.read()).hello
        watch.cancel()
        return PrefillTarget(hello.worker_id, hello.address, hello.incarnation)


@dataclass(frozen=True, slots=True)
class Answer:
    """`ttft_s` and `itl_s` as seen by the caller of the session."""

    token_ids: list[int]
    ttft_s: float
    itl_s: list[float]
    gathered: Gathered


class Session:
    """One request at a time on one decode worker."""

    def __init__(self, worker: Child) -> None:
        self._channel = channel.connect(worker.address)
        self._call: grpc.aio.StreamStreamCall = generation_pb2_grpc.DecodeStub(self._channel).Session()

    async def run(
        self, prompt: Sequence[int], max_tokens: int, prefill: PrefillTarget | None = None, salt: str = ""
    ) -> Answer:
        """Greedy, to the end; raises RuntimeError when the worker reports a failure."""
        sampling = SamplingParams(max_tokens=max_tokens, seed=0, temperature=0.0)
        request = Request(
            uuid.uuid4().hex, tuple(prompt), sampling, prefill=prefill, cache_salt=salt or uuid.uuid4().hex
        )
        started = time.perf_counter()
        await self._call.write(pb.SessionRequest(start=codec.request_to_wire(request)))
        tokens: list[int] = []
        at: list[float] = []
        gathered = Gathered()
        while True:
            async with asyncio.timeout(300):
                reply = await self._call.read()
            if not isinstance(reply, pb.SessionReply) or reply.failures:
                raise RuntimeError(f"the decode worker failed: {reply}")
            for delta in map(codec.delta_from_wire, reply.deltas):
                at.append(time.perf_counter())
                tokens += delta.token_ids
                gathered = delta.gathered or gathered
                if delta.finish_reason:
                    gaps = [b - a for a, b in itertools.pairwise(at)]
                    return Answer(tokens, at[0] - started, gaps, gathered)

    async def close(self) -> None:
        self._call.cancel()
        await self._channel.close()
