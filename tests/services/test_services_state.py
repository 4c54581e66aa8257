"""What routers are told of a worker: its step models, its queue in tokens, its links."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from core.kv import Fingerprint
from core.settings import Settings
from core.step_model import StepModel
from engine.messages import EngineStats
from engine.step import Limits
from planning.price import LINK_GUESS_NBYTES_PER_S
from services.worker.host import WorkerHost
from services.worker.hub import Hub
from services.worker.links import MAX_LINKS, Links
from services.worker.watch import WatchService
from wire import codec
from wire.v1 import worker_pb2 as pb

FINGERPRINT = Fingerprint("m", "t", 1, 1, 64, 8, "fp32", "default/1", 64)


def host_with(stats: EngineStats) -> WorkerHost:
    """A worker of whose parts only those exist that a State reads."""
    built = SimpleNamespace(
        fingerprint=FINGERPRINT,
        limits=Limits(8, 64, max_num_seqs=12, max_num_batched_tokens=96, max_waiting=5),
        loop=SimpleNamespace(stats=stats, idle_s=0.25),
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
    assert (state.queued_tokens, state.context_tokens) == (700, 1234)
    assert [(link.peer, link.nbytes_per_s) for link in state.links] == [("p-life", pytest.approx(3e8))]


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
