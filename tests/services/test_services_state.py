"""What routers are told of a worker: its step models, its queue in tokens, its links."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from core.kv import Fingerprint
from core.request import Request, SamplingParams
from core.settings import Settings
from core.step_model import StepModel
from engine.messages import Add, AddPrefill, EngineStats
from engine.sequence import PrefillJob
from engine.step import Limits
from planning.price import LINK_GUESS_NBYTES_PER_S
from services.worker.host import WorkerHost
from services.worker.hub import Hub
from services.worker.links import MAX_LINKS, Links
from services.worker.taken import LIMIT as TAKEN_LIMIT
from services.worker.taken import TakenLog
from services.worker.watch import WatchService
from wire import codec
from wire.v1 import worker_pb2 as pb

FINGERPRINT = Fingerprint("m", "t", 1, 1, 64, 8, "fp32", "default/1", 64)


def host_with(stats: EngineStats) -> WorkerHost:
    """A worker of whose parts only those exist that a State reads."""
    built = SimpleNamespace(
        fingerprint=FINGERPRINT,
        limits=Limits(8, 64, max_num_seqs=12, max_num_batched_tokens=96, max_waiting=5),
        loop=SimpleNamespace(stats=stats, idle_s=0.25, step_s=0.125, submit=lambda work: None),
        ranks=SimpleNamespace(transports=["shm"]),
        footprint=SimpleNamespace(num_blocks=40, dtype="fp32"),
        stack=None,
    )
    host = WorkerHost(Settings.model_validate({}), "decode", "d0", "life", Hub())
    host._built = built  # type: ignore[assignment]
    return host


async def watched(host: WorkerHost) -> tuple[pb.Hello, pb.State]:
    events = WatchService(host, lambda role: None).Watch(pb.WatchRequest(), None)  # type: ignore[arg-type]
    hello, state = (await anext(events)).hello, (await anext(events)).state
    await events.aclose()  # type: ignore[attr-defined]
    return hello, state


async def test_a_state_carries_what_planning_needs() -> None:
    stats = EngineStats(
        queued_tokens=700,
        context_tokens=1234,
        prefill_model=StepModel(0.01, 0.001, 2e-7, 17),
        decode_model=StepModel(0.02, 0.002, 3e-7, 99),
    )
    host = host_with(stats)
    host.links.pulled("p-life", 3_000_000, 0.01)
    hello, state = await watched(host)
    assert (hello.max_num_seqs, hello.max_num_batched_tokens) == (12, 96)
    assert codec.step_model_from_wire(state.prefill_model) == stats.prefill_model
    assert codec.step_model_from_wire(state.decode_model) == stats.decode_model
    assert (state.queued_tokens, state.context_tokens, state.step_s) == (700, 1234, 0.125)
    assert [(link.peer, link.nbytes_per_s) for link in state.links] == [("p-life", pytest.approx(3e8))]


async def test_each_request_is_named_by_the_first_state_that_counts_it() -> None:
    host, names = host_with(EngineStats()), [f"r{i}" for i in range(5)]
    for name in names[:2]:
        host.take_up(name, Add(Request(name, (1, 2), SamplingParams(max_tokens=1, seed=0))))
    service = WatchService(host, lambda role: None)
    events = service.Watch(pb.WatchRequest(), None)  # type: ignore[arg-type]
    told = []
    while len(told) < 3:
        event = await anext(events)
        if event.WhichOneof("kind") == "state":
            told.append(list(event.state.taken))
            for name in names[2:] if len(told) == 1 else ():
                host.take_up(name, AddPrefill(PrefillJob("job", (1, 2))))
            service.wake()
    await events.aclose()  # type: ignore[attr-defined]
    assert told == [names[:2], names[2:], []]


def test_of_many_requests_the_last_ones_are_remembered() -> None:
    log = TakenLog()
    for number in range(TAKEN_LIMIT + 3):
        log.add(f"r{number}")
    taken, cursor = log.since(1)
    assert (len(taken), taken[0], cursor) == (TAKEN_LIMIT, "r3", TAKEN_LIMIT + 3)
    assert log.since(cursor) == ([], cursor)


def test_a_pull_counts_as_much_as_it_moved() -> None:
    links = Links()
    assert links.rate("p") == LINK_GUESS_NBYTES_PER_S
    links.pulled("p", 1_000_000, 0.001)
    assert links.rate("p") == pytest.approx(1e9)
    links.pulled("p", 1_000, 0.001)  # a small one, of which most is the way there and back
    assert links.rate("p") == pytest.approx(801_000 / 0.0018)
    for _ in range(30):
        links.pulled("p", 1_000_000, 0.01)
    assert links.rate("p") == pytest.approx(1e8, rel=0.01)
    links.pulled("q", 5, 0.0)
    assert links.rates() == {"p": links.rate("p")}


def test_links_of_the_peers_pulled_from_last_are_kept() -> None:
    links = Links()
    for i in range(MAX_LINKS + 2):
        links.pulled(f"p{i}", 1000, 1.0)
        links.pulled("p0", 1000, 1.0)
    assert len(links.rates()) == MAX_LINKS
    assert {"p0", f"p{MAX_LINKS + 1}"} <= set(links.rates())
    assert "p1" not in links.rates()
