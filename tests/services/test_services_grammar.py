"""A grammar that is new to a decode worker is compiled beside the session, not in its way."""

from __future__ import annotations

import asyncio
import threading
from types import SimpleNamespace
from typing import NoReturn

import grpc
import pytest

from core.errors import InvalidParameter
from core.request import Grammar, Request, SamplingParams
from core.settings import Settings
from engine.messages import Abort, Add, Command
from services.decode import service
from services.worker.hub import Hub
from wire import codec
from wire.v1 import generation_pb2 as pb


class Grammars:
    """Stands for `engine.grammar.GrammarCompiler`: compiling lasts until `release` is set."""

    def __init__(self) -> None:
        self.release = threading.Event()
        self.begun = threading.Event()
        self.compiled: set[str] = set()

    def load(self) -> None: ...

    def cached(self, sampling: SamplingParams) -> str | None:
        return sampling.grammar.text if sampling.grammar.text in self.compiled else None

    def compile(self, sampling: SamplingParams) -> str:
        self.begun.set()
        assert self.release.wait(10)
        if sampling.grammar.text == "bad":
            raise InvalidParameter("x.y: no start rule", param="x")
        if sampling.grammar.text == "broken":
            raise RuntimeError("planted")
        self.compiled.add(sampling.grammar.text)
        return sampling.grammar.text


async def _holds_nothing(_: Request) -> int:
    return 0


class Bench:
    """One session of a decode service whose engine only collects commands."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        loader = SimpleNamespace(
            expect=lambda _: None, forget=lambda _: None, on_event=lambda _: None, look_up=_holds_nothing
        )
        monkeypatch.setattr(service, "Loader", lambda host: loader)
        self.commands: list[Command] = []
        self.grammars = Grammars()
        built = SimpleNamespace(
            config=SimpleNamespace(vocab_size=100),
            loop=SimpleNamespace(submit=lambda *commands: self.commands.extend(commands)),
            grammars=self.grammars,
        )
        self.hub = Hub()
        host = SimpleNamespace(
            built=built, hub=self.hub, role="decode", listeners=[], require_ready=lambda: None, lookups=None,
            settings=Settings(max_waiting=3), take_up=lambda _, add: self.commands.append(add),
        )  # fmt: skip
        self.service = service.DecodeService(host)  # type: ignore[arg-type]
        self._sent: asyncio.Queue[pb.SessionRequest] = asyncio.Queue()
        self.replies = self.service.Session(self._messages(), None)  # type: ignore[arg-type]
        self._next = asyncio.ensure_future(anext(self.replies))

    async def _messages(self):
        while True:
            yield await self._sent.get()

    def start(self, name: str, grammar: str | None) -> None:
        params = SamplingParams(max_tokens=1, seed=0, grammar=Grammar(grammar, "x.y") if grammar else None)
        self._sent.put_nowait(pb.SessionRequest(start=codec.request_to_wire(Request(name, (1,), params))))

    def cancel(self, name: str) -> None:
        self._sent.put_nowait(pb.SessionRequest(cancel=pb.Cancel(request_id=name)))

    async def failure(self) -> pb.Failure:
        async with asyncio.timeout(5):
            reply = await self._next
        self._next = asyncio.ensure_future(anext(self.replies))
        return reply.failures[0]

    async def until(self, condition) -> None:
        async with asyncio.timeout(5):
            while not condition():
                await asyncio.sleep(0.005)

    def added(self) -> list[tuple[str, object]]:
        return [(c.request.request_id, c.matcher) for c in self.commands if isinstance(c, Add)]

    async def close(self) -> None:
        self.grammars.release.set()
        self._next.cancel()
        await asyncio.gather(self._next, return_exceptions=True)
        await self.replies.aclose()
        self.service._grammar_thread.close()


@pytest.fixture
async def bench(monkeypatch):
    made = Bench(monkeypatch)
    yield made
    await made.close()


async def test_others_start_while_a_grammar_is_compiled(bench) -> None:
    bench.start("slow", "g")
    bench.start("plain", None)
    await bench.until(lambda: bench.added() == [("plain", None)])
    bench.grammars.release.set()
    await bench.until(lambda: bench.added()[1:] == [("slow", "g")])
    bench.start("again", "g")
    await bench.until(lambda: bench.added()[2:] == [("again", "g")])


async def test_a_request_cancelled_meanwhile_never_reaches_the_engine(bench) -> None:
    bench.start("gone", "g")
    await bench.until(bench.grammars.begun.is_set)
    bench.cancel("gone")
    await bench.until(lambda: Abort("gone") in bench.commands)
    bench.grammars.release.set()
    bench.start("next", "h")
    await bench.until(lambda: bench.added() == [("next", "h")])
    assert bench.hub.num_registered == 1


@pytest.mark.parametrize(
    ("grammar", "code", "param", "word"),
    [("bad", "invalid_parameter", "x", "no start rule"), ("broken", "engine_fault", "", "RuntimeError")],
)
async def test_what_cannot_be_compiled_is_a_failure_of_its_request(bench, grammar, code, param, word) -> None:
    bench.grammars.release.set()
    bench.start("r", grammar)
    failure = await bench.failure()
    assert (failure.request_id, failure.code, failure.param) == ("r", code, param)
    assert word in failure.message
    assert bench.added() == []
    assert bench.hub.num_registered == 0


async def test_what_waits_for_its_grammar_is_bounded(bench) -> None:
    """1. As many as may wait wait for a grammar that takes long.  2. The next one is told to come back."""
    for i in range(3):
        bench.start(f"r{i}", "slow")
    bench.start("more", "slow")
    failure = await bench.failure()
    assert (failure.request_id, failure.code) == ("more", "overloaded")
    bench.grammars.release.set()
    await bench.until(lambda: len(bench.added()) == 3)
    bench.start("later", "slow")
    await bench.until(lambda: len(bench.added()) == 4)


async def test_the_number_of_sessions_is_bounded(bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """A session that ends makes room."""
    monkeypatch.setattr(service, "MAX_SESSIONS", 2)

    class Refused(Exception):
        pass

    class Context:
        async def abort(self, status: grpc.StatusCode, details: str, metadata: object) -> NoReturn:
            assert status is grpc.StatusCode.RESOURCE_EXHAUSTED
            raise Refused(details)

    await bench.until(lambda: len(bench.service._sessions) == 1)
    second = bench.service.Session(bench._messages(), Context())
    opening = asyncio.ensure_future(anext(second))
    await bench.until(lambda: len(bench.service._sessions) == 2)
    with pytest.raises(Refused, match="2 routers"):
        await anext(bench.service.Session(bench._messages(), Context()))
    opening.cancel()
    await asyncio.gather(opening, return_exceptions=True)
    await second.aclose()
    assert len(bench.service._sessions) == 1
