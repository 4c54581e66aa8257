"""What the router itself costs, between workers that only speak the protocol and a client that costs little.

    python -m benchmarks.router_overhead [--seconds 5] [--decode 8] [--prefill 2] [-- FLAGS]
    python -m benchmarks.router_overhead --big-prompt [--megabytes 5]

The router has the first core that this process may use to itself, the workers and the client have the rest.
Rates are given by wall clock and by second of the router's CPU time, which another program on the machine
changes little. Added latency: what the client saw, less what the worker took; the worker writes down when it
sent each token.

short     chat, about 50 tokens in, 4 out in steps of 1 ms, not streamed, on N connections
streams   N streams, each worker a step every 50 ms
flood     500 streams, each worker a step every 8 ms: more tokens than can be written one by one
"""

from __future__ import annotations

import argparse
import asyncio
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import httpx
import orjson
import psutil
import uvloop
from rich.console import Console
from rich.table import Table

from benchmarks.fake_workers import TOKEN_TEXT, FakeWorkers, fake_workers
from benchmarks.http_load import Answer, Client
from benchmarks.serving import end
from checkpoint.open import open_checkpoint
from core.kv import Fingerprint
from core.settings import Settings
from services.address import free_port

HOST, START_S = "127.0.0.1", 60.0
SHORT_CONNECTIONS = (1, 16, 64)
SHORT_STEP_S, SHORT_TOKENS = 0.001, 4
STREAMS, STREAM_STEP_S = (100, 1000), 0.05
FLOOD_STREAMS, FLOOD_STEP_S, FLOOD_TOKENS = 500, 0.008, 400
BIG_STREAMS, BIG_STREAM_TOKENS, BIG_SECONDS, HEALTH_EVERY_S = 50, 80, 2.0, 0.005
QUESTION = "Write down in a few words what a reader of this page should know about trains. " * 3


@dataclass(frozen=True, slots=True)
class Rig:
    """What is measured and with what."""

    port: int
    router: psutil.Process
    workers: FakeWorkers

    def cpu_s(self) -> float:
        return sum(self.router.cpu_times()[:2])

    async def clients(self, count: int) -> list[Client]:
        return [await Client.connect(HOST, self.port, TOKEN_TEXT.encode()) for _ in range(count)]


@contextmanager
def rig(num_prefill: int, num_decode: int, flags: Sequence[str]) -> Iterator[Rig]:
    """A router and its workers, ready; ended with the block."""
    cores = sorted(os.sched_getaffinity(0))
    rest = set(cores[1:]) or set(cores)
    checkpoint = open_checkpoint(Settings.model_validate({}).model)
    print_ = Fingerprint("m", checkpoint.tokenizer_digest, 30, 3, 64, 16, "bf16", "default/100000", 8192)
    os.sched_setaffinity(0, rest)
    with fake_workers(num_prefill, num_decode, print_) as workers, tempfile.TemporaryFile() as errors:
        port = free_port(HOST)
        command = [sys.executable, "-m", "services.cli", "router", f"--port={port}", *flags]
        command.append(f"--discovery=static://{','.join(workers.addresses)}")
        os.sched_setaffinity(0, cores[:1])
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stderr=errors)
        os.sched_setaffinity(0, rest)
        try:
            _wait_until_ready(process, port, len(workers.addresses))
            yield Rig(port, psutil.Process(process.pid), workers)
        finally:
            end(process)
            os.sched_setaffinity(0, cores)


def _wait_until_ready(process: subprocess.Popen[bytes], port: int, num_workers: int) -> None:
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline and process.poll() is None:
        try:
            states = [w["state"] for w in httpx.get(f"http://{HOST}:{port}/ready").json()["workers"]]
            if states == ["ready"] * num_workers:
                return
        except (httpx.TransportError, ValueError):
            pass
        time.sleep(0.1)
    raise SystemExit("the router did not become ready; run it by hand to see why")


def _chat(max_tokens: int, *, stream: bool) -> dict[str, object]:
    messages = [{"role": "user", "content": QUESTION}]
    return {"messages": messages, "max_tokens": max_tokens, "temperature": 0, "stream": stream}


def _checked(answers: Sequence[Answer]) -> None:
    for answer in answers:
        if answer.status != 200:
            raise SystemExit(f"the router answered {answer.status}: {answer.body[:300].decode()}")


async def short(given: Rig, connections: int, seconds: float) -> tuple[str, ...]:
    """One request after another on each connection."""
    given.workers.set_pace(SHORT_STEP_S)
    clients, body = await given.clients(connections), _chat(SHORT_TOKENS, stream=False)
    _checked(await asyncio.gather(*(client.post("/v1/chat/completions", body) for client in clients)))
    given.workers.courses()
    answers: list[Answer] = []
    until, cpu_s, began = time.perf_counter() + seconds, given.cpu_s(), time.perf_counter()

    async def ask(client: Client) -> None:
        while time.perf_counter() < until:
            answers.append(await client.post("/v1/chat/completions", body))

    await asyncio.gather(*map(ask, clients))
    wall_s, cpu_s = time.perf_counter() - began, given.cpu_s() - cpu_s
    for client in clients:
        client.close()
    _checked(answers)
    courses, added = given.workers.courses(), []
    for answer in answers:
        course = courses[answer.id]
        added.append(answer.ended_at - answer.asked_at - (course.sent_at[-1] - course.began_at))
    return (f"short, {connections} at once", *_rates(len(answers), wall_s, cpu_s), *_spread(added), "", "")


async def streams(given: Rig, name: str, count: int, step_s: float, tokens: int) -> tuple[str, ...]:
    """All begin at once; what each of their tokens took, after the first ones."""
    given.workers.set_pace(step_s)
    clients, body = await given.clients(count), _chat(tokens, stream=True)
    given.workers.courses()
    cpu_s = given.cpu_s()
    asked = [asyncio.create_task(client.post("/v1/chat/completions", body)) for client in clients]
    await asyncio.gather(*(client.begun.wait() for client in clients))
    begun_s, begun_tokens = time.perf_counter(), sum(client.num_marks for client in clients)
    begin_cpu_s = given.cpu_s() - cpu_s
    answers = await asyncio.gather(*asked)
    wall_s, cpu_s = time.perf_counter() - begun_s, given.cpu_s() - cpu_s - begin_cpu_s
    for client in clients:
        client.close()
    _checked(answers)
    courses = given.workers.courses()
    added, firsts = [], []
    for answer in answers:
        course, number = courses[answer.id], 0
        firsts.append(answer.at[0][0] - answer.asked_at - (course.sent_at[0] - course.began_at))
        for at, num_tokens in answer.at:
            sent = course.sent_at[number : number + num_tokens]
            number += num_tokens
            added += [at - each for each in sent if at > begun_s]
        if number != tokens:
            raise SystemExit(f"an answer had {number} tokens, its worker sent {tokens}")
    num_tokens = count * tokens - begun_tokens
    return (name, *_rates(num_tokens, wall_s, cpu_s), *_spread(added), *_spread(firsts))


def _rates(count: int, wall_s: float, cpu_s: float) -> tuple[str, str, str]:
    return f"{count / wall_s:,.0f}", f"{count / max(cpu_s, 0.01):,.0f}", f"{cpu_s / wall_s:.0%}"


def _spread(seconds: Sequence[float]) -> tuple[str, str]:
    ordered = sorted(seconds)
    return tuple(f"{1e3 * ordered[min(len(ordered) - 1, int(q * len(ordered)))]:.2f}" for q in (0.5, 0.99))  # type: ignore[return-value]


async def measure(given: Rig, seconds: float) -> Table:
    table = Table(
        *("", "a second", "a CPU second", "CPU", "added p50 ms", "p99", "first p50 ms", "p99"),
        title="the router alone: requests (short) or tokens",
    )
    await short(given, 16, 1.0)  # warm
    for connections in SHORT_CONNECTIONS:
        table.add_row(*await short(given, connections, seconds))
    for count in STREAMS:
        tokens = int(seconds / STREAM_STEP_S)
        table.add_row(*await streams(given, f"streams, {count}", count, STREAM_STEP_S, tokens))
    table.add_row(*await streams(given, f"flood, {FLOOD_STREAMS}", FLOOD_STREAMS, FLOOD_STEP_S, FLOOD_TOKENS))
    return table


def _big_bodies(nbytes: int) -> Iterator[tuple[str, str, dict[str, object]]]:
    """What, where and the body, about `nbytes` long."""
    text, part = ("a train of words that goes on, " * (nbytes // 31 + 1))[:nbytes], nbytes // 128
    texts = [text[i * part : (i + 1) * part] for i in range(128)]
    turn = {"role": "user", "content": "a few words"}
    yield "completion, one text", "/v1/completions", {"prompt": text}
    yield "completion, 128 texts", "/v1/completions", {"prompt": texts}
    yield "completion, token ids", "/v1/completions", {"prompt": [12345] * (nbytes // 6)}
    yield "chat, one text", "/v1/chat/completions", {"messages": [turn | {"content": text}]}
    yield "chat, many turns", "/v1/chat/completions", {"messages": [turn] * (nbytes // 44)}
    yield "tokenize", "/tokenize", {"prompt": text}
    yield "detokenize", "/detokenize", {"tokens": [12345] * (nbytes // 6)}


async def big_prompt(given: Rig, megabytes: float) -> Table:
    """GET /health, every 5 ms, while such a body is posted again and again for 2 s, and streams run."""
    given.workers.set_pace(STREAM_STEP_S)
    table = Table(
        *("body", "status", "took ms", "health p50 ms", "p99", "max"),
        title=f"GET /health while {megabytes:g} MB are posted, {BIG_STREAMS} streams",
    )
    for name, path, body in _big_bodies(int(megabytes * 1e6)):
        clients, (prober, poster) = await given.clients(BIG_STREAMS), await given.clients(2)
        stream = _chat(BIG_STREAM_TOKENS, stream=True)
        running = [asyncio.create_task(client.post("/v1/chat/completions", stream)) for client in clients]
        await asyncio.gather(*(client.begun.wait() for client in clients))
        data, waits, until = orjson.dumps(body), list[float](), time.perf_counter() + BIG_SECONDS
        posted = asyncio.create_task(_post_until(until, poster, path, data))
        while not posted.done():
            health = await prober.get("/health")
            waits.append(health.ended_at - health.asked_at)
            await asyncio.sleep(HEALTH_EVERY_S)
        answer = await posted
        _checked(await asyncio.gather(*running))
        for client in (*clients, prober, poster):
            client.close()
        took = f"{1e3 * (answer.ended_at - answer.asked_at):.0f}"
        table.add_row(name, f"{answer.status}", took, *_spread(waits), f"{1e3 * max(waits):.1f}")
    return table


async def _post_until(until: float, client: Client, path: str, data: bytes) -> Answer:
    """The last answer."""
    while True:
        answer = await client.post(path, data)
        if time.perf_counter() > until:
            return answer


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--seconds", type=float, default=5.0)
    parser.add_argument("--prefill", type=int, default=2)
    parser.add_argument("--decode", type=int, default=8)
    parser.add_argument("--big-prompt", action="store_true")
    parser.add_argument("--megabytes", type=float, default=5.0)
    parser.add_argument("flags", nargs="*")
    given = parser.parse_args()
    with rig(given.prefill, given.decode, given.flags) as made:
        if given.big_prompt:
            table = uvloop.run(big_prompt(made, given.megabytes))
        else:
            table = uvloop.run(measure(made, given.seconds))
    Console(width=120).print(table)


if __name__ == "__main__":
    main()
