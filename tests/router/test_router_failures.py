"""What breaks on the way to an answer, and what the client and the workers learn of it (A6, A7)."""

from __future__ import annotations

import asyncio
import json
import socket
import time
from collections import deque

import openai
import pytest
import structlog
from router_fakes import says

from core.errors import ContextLengthExceeded, EngineFault, Overloaded
from core.request import FinishReason, TokenDelta

IDS = list(range(600, 700))
FOREVER = says(IDS * 40, finish=FinishReason.LENGTH, delay_s=0.01)


async def start(stack, **options):
    ask = stack.client.completions.create
    return await ask(**{"model": stack.model, "prompt": "x", "max_tokens": 4000, **options})


async def read(stream, into: list) -> None:
    """Read a stream to its end; what came before an error is kept."""
    async for event in stream:
        into += [event]


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (EngineFault("the step failed"), openai.InternalServerError),
        (Overloaded("full"), openai.RateLimitError),
        (ContextLengthExceeded("100 > 10", param="prompt"), openai.BadRequestError),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
async def test_before_the_first_token_an_error_is_a_status(stack_of, error, status, stream):
    async with stack_of(says(IDS, fail_at=0, error=error)) as stack:
        with pytest.raises(status) as caught:
            await start(stack, stream=stream)
        assert caught.value.status_code == error.http_status
        assert caught.value.code == error.code
        assert error.message in caught.value.message
        if isinstance(error, Overloaded):
            assert caught.value.response.headers["retry-after"] == "1"


@pytest.mark.parametrize("n", [1, 2])
async def test_after_three_tokens_an_error_is_one_event_and_the_end(stack_of, n):
    async with stack_of(says(IDS, fail_at=3, error=EngineFault("the step failed"))) as stack:
        got = []
        stream = await start(stack, stream=True, n=n)
        with pytest.raises(openai.APIError, match="the step failed"):
            await read(stream, got)
        got = [choice for event in got for choice in event.choices]
        assert len(got) == 3 * n
        assert not any(choice.finish_reason for choice in got)
        body = {"model": stack.model, "prompt": "x", "stream": True}
        raw = await stack.http.post("/v1/completions", json=body)
        events = raw.text.removesuffix("\n\n").split("\n\n")
        assert json.loads(events[-1].removeprefix("data: "))["error"]["code"] == "engine_fault"
        assert sum("error" in event for event in events) == 1
        assert "[DONE]" not in raw.text
        whole = await stack.http.post("/v1/completions", json={**body, "stream": False})
        assert (whole.status_code, whole.json()["error"]["code"]) == (500, "engine_fault")


async def test_worker_dies_in_mid_stream(stack_of):
    """1. A stream runs.  2. The worker is gone, and no other is waited for.  3. The client knows within 2 s, and so
    does /ready.  4. The worker comes back at its address: the next request is answered."""
    async with stack_of(FOREVER, resume_timeout_s=0) as stack:
        stream = await start(stack, stream=True)
        await anext(aiter(stream))
        began = time.monotonic()
        await stack.worker.stop()
        with pytest.raises(openai.APIError, match="was lost"):
            await read(stream, [])
        assert time.monotonic() - began < 2
        await stack.until(lambda: stack.states() == {"decode-0": "lost"})
        assert (await stack.http.get("/ready")).status_code == 503
        with pytest.raises(openai.InternalServerError) as caught:
            await start(stack)
        assert caught.value.code == "unavailable"
        await stack.worker.start()
        await stack.until(lambda: stack.states() == {"decode-0": "ready"})
        answer = await start(stack, max_tokens=3)
        assert answer.usage.completion_tokens == 3
        lines = stack.router.metrics.exposition().decode()
        assert 'baton_worker_connections_lost_total{role="decode"} 1.0' in lines


async def test_worker_dies_before_the_first_token(stack_of):
    async with stack_of(says(IDS, delay_s=30), resume_timeout_s=0) as stack:
        asked = asyncio.create_task(start(stack))
        await stack.until(lambda: bool(stack.worker.open))
        await stack.worker.stop()
        with pytest.raises(openai.InternalServerError) as caught:
            async with asyncio.timeout(2):
                await asked
        assert (caught.value.status_code, caught.value.code) == (503, "worker_lost")


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("first_token_s", [0.01, 30])
async def test_a_client_that_leaves_is_cancelled_at_the_worker(stack_of, stream, first_token_s):
    script = says(IDS * 40, finish=FinishReason.LENGTH, delay_s=first_token_s)
    async with stack_of(script) as stack:
        body = json.dumps(
            {
                "model": stack.model,
                "prompt": "x",
                "stream": stream,
                "max_tokens": 4000,
                "n": 2,
                "ignore_eos": True,
            }
        )
        reader, writer = await asyncio.open_connection(*tuple_of(stack.url))
        writer.write(request("/v1/completions", body))
        await stack.until(lambda: bool(stack.worker.open))
        if stream and first_token_s < 1:
            await reader.readuntil(b"data: ")
        writer.close()
        await stack.until(lambda: not stack.worker.open, 2)
        request_id = stack.worker.starts[0].request_id
        assert stack.worker.cancels == [(request_id, None)]
        await stack.until(lambda: "baton_client_disconnects_total 1.0" in exposition(stack))
        assert "baton_requests_in_flight 0.0" in exposition(stack)


def tuple_of(url: str) -> tuple[str, int]:
    host, port = url.removeprefix("http://").split(":")
    return host, int(port)


def request(path: str, body: str) -> bytes:
    return f"POST {path} HTTP/1.1\r\nhost: x\r\ncontent-length: {len(body)}\r\n\r\n{body}".encode()


def exposition(stack) -> str:
    return stack.router.metrics.exposition().decode()


async def test_one_failing_prompt_cancels_its_siblings(stack_of):
    async def script(request):
        inner = (
            FOREVER if len(request.prompt_token_ids) == 1 else says(IDS, fail_at=2, error=EngineFault("no"))
        )
        async for delta in inner(request):
            yield delta

    async with stack_of(script) as stack:
        with pytest.raises(openai.InternalServerError):
            await start(stack, prompt=[[504], [504, 505]])
        await stack.until(lambda: not stack.worker.open)
        assert [c for _, c in stack.worker.cancels] == [None]


async def test_a_request_has_an_end(stack_of):
    async with stack_of(FOREVER, request_timeout_s=0.5) as stack:
        with pytest.raises(openai.InternalServerError, match=r"0\.5 s") as caught:
            await start(stack)
        assert "retry-after" not in caught.value.response.headers, "soon it would take as long again"
        got = []
        stream = await start(stack, stream=True)
        with pytest.raises(openai.APIError, match=r"0\.5 s"):
            await read(stream, got)
        assert got
        await stack.until(lambda: not stack.worker.open)


async def test_more_requests_than_places(stack_of):
    async with stack_of(says(IDS, delay_s=30), max_concurrent_requests=2) as stack:
        held = [asyncio.create_task(start(stack)) for _ in range(2)]
        await stack.until(lambda: len(stack.worker.open) == 2)
        with pytest.raises(openai.RateLimitError) as caught:
            await start(stack)
        assert caught.value.response.headers["retry-after"] == "1"
        for task in held:
            task.cancel()
        await asyncio.gather(*held, return_exceptions=True)
        await stack.until(lambda: not stack.worker.open)
        assert "baton_requests_in_flight 0.0" in exposition(stack)


async def test_a_slow_reader_is_cancelled_and_slows_nobody(stack_of, monkeypatch):
    """1. A client asks for a long stream and does not read it.  2. Its answers fill the socket, then
    its queue.  3. Its request is cancelled; another client's stream ran at full speed meanwhile."""
    monkeypatch.setattr("services.router.endpoint.INBOX_DELTAS_PER_CHOICE", 16)
    fast = says(IDS * 40, finish=FinishReason.LENGTH)
    async with stack_of(fast, blocks=10_000) as stack:
        chat = {"model": stack.model, "messages": [{"role": "user", "content": "x"}], "stream": True}
        body = json.dumps(chat | {"max_tokens": 4000, "logprobs": True, "top_logprobs": 20})
        narrow = socket.socket()
        narrow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        narrow.connect(tuple_of(stack.url))
        narrow.setblocking(False)
        reader, writer = await asyncio.open_connection(sock=narrow, limit=1024)
        writer.transport.pause_reading()
        writer.write(request("/v1/chat/completions", body))
        answer = await start(stack, max_tokens=200)
        assert answer.usage.completion_tokens == 200
        await stack.until(lambda: bool(stack.worker.cancels), 20)
        assert stack.worker.cancels == [(stack.worker.starts[0].request_id, None)]
        writer.transport.resume_reading()
        rest = await reader.read(-1)
        assert b'"code":"overloaded"' in rest
        assert b"[DONE]" not in rest


async def test_a_bug_is_an_envelope_and_a_log_line_without_its_words(stack_of, monkeypatch):
    def broken(*_):
        raise ValueError("secret words")

    monkeypatch.setattr("services.router.endpoint.Generation.start", broken)
    with structlog.testing.capture_logs() as captured:
        async with stack_of() as stack:
            answer = await stack.http.post("/v1/completions", json={"model": stack.model, "prompt": "x"})
    assert (answer.status_code, answer.json()["error"]["code"]) == (500, "internal_error")
    [bug] = [line for line in captured if line["event"] == "router.bug"]
    assert bug["kind"] == "ValueError"
    assert "secret words" not in repr(captured) + answer.text


async def test_a_message_nobody_understands_is_a_lost_stream(stack_of):
    """1. A newer worker ends a choice for a reason that is unknown here.  2. All its requests are lost,
    the fault is counted.  3. The stream is opened anew: the next request is answered."""

    async def script(request):
        yield TokenDelta(request.request_id, 0, (504,))
        if len(request.prompt_token_ids) == 1:
            await asyncio.sleep(30)
        elif len(request.prompt_token_ids) == 2:
            yield TokenDelta(request.request_id, 0, (), (), "paused")
        else:
            yield TokenDelta(request.request_id, 0, (), (), FinishReason.LENGTH)

    async with stack_of(script, resume_timeout_s=0) as stack:
        bystander = asyncio.create_task(start(stack, prompt=[504]))
        await stack.until(lambda: bool(stack.worker.open))
        for asked in (asyncio.create_task(start(stack, prompt=[504] * 2)), bystander):
            with pytest.raises(openai.InternalServerError) as caught:
                async with asyncio.timeout(2):
                    await asked
            assert caught.value.code == "worker_lost"
        assert 'baton_faults_total{where="session"} 1.0' in exposition(stack)
        await stack.until(lambda: stack.up() == 1)
        answer = await start(stack, prompt=[504] * 3)
        assert answer.choices[0].finish_reason == "length"


async def test_a_bug_while_watching_is_a_lost_stream_too(stack_of, monkeypatch):
    async with stack_of() as stack:
        with monkeypatch.context() as patch:
            patch.setattr(stack.router.fleet.roster, "state", None)
            stack.worker.change(running=1)
            await stack.until(lambda: stack.states() == {"decode-0": "lost"})
        assert 'baton_faults_total{where="watch"}' in exposition(stack)
        await stack.until(lambda: stack.states() == {"decode-0": "ready"})
        await start(stack, max_tokens=3)


class Broken(deque):
    def popleft(self):
        raise KeyError


async def test_a_bug_in_the_writer_ends_the_stream(stack_of):
    async with stack_of(says(IDS, delay_s=30), resume_timeout_s=0) as stack:
        bystander = asyncio.create_task(start(stack))
        await stack.until(lambda: bool(stack.worker.open))
        [decode] = stack.router.fleet.view().decode
        session = stack.router.fleet.session(decode.incarnation)
        session._cancels = Broken([None])
        session._wake.set()
        with pytest.raises(openai.InternalServerError, match="was lost"):
            async with asyncio.timeout(2):
                await bystander
        assert 'baton_faults_total{where="session"} 1.0' in exposition(stack)
        await stack.until(lambda: session.up)


async def test_a_worker_that_reads_nothing_is_lost(stack_of, monkeypatch, capfd):
    """1. A worker reads no more.  2. What is sent fills the connection.  3. A write takes too long: all
    its requests are lost."""
    monkeypatch.setattr("services.router.session.WRITE_TIMEOUT_S", 0.5)

    async def deaf(self, messages, replies):
        await asyncio.sleep(30)

    async with stack_of(blocks=10_000, seats=1024, resume_timeout_s=0) as stack:
        monkeypatch.setattr(type(stack.worker), "_read", deaf)
        await stack.worker.stop()
        await stack.until(lambda: stack.up() == 0)  # else the old stream may still count as up below
        await stack.worker.start()
        await stack.until(lambda: stack.states() == {"decode-0": "ready"})
        await stack.until(lambda: stack.up() == 1)
        asked = [start(stack, prompt=[[40_000] * 8000] * 8, max_tokens=1) for _ in range(20)]
        async with asyncio.timeout(10):
            outcomes = await asyncio.gather(*asked, return_exceptions=True)
        assert {getattr(outcome, "code", outcome) for outcome in outcomes} <= {"worker_lost", "unavailable"}
        assert "worker_lost" in {getattr(outcome, "code", None) for outcome in outcomes}
    logged = capfd.readouterr()
    assert "has read nothing" in logged.out + logged.err


async def test_while_cancels_wait_nothing_is_started(stack_of, monkeypatch):
    monkeypatch.setattr("services.router.session.MAX_UNSENT_CANCELS", 0)
    async with stack_of() as stack:
        with pytest.raises(openai.RateLimitError):
            await start(stack)
