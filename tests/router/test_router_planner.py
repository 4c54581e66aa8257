"""From a fleet of any size to a plan, and from a plan to what a decode worker is told of its prefill worker."""

from __future__ import annotations

import random
from typing import Any

import pytest
from router_fakes import fingerprint

from core.step_model import StepModel
from planning.estimate import Targets
from planning.plan import Forced, RequestFacts, plan
from planning.worker_view import Sent
from services.router.planner import target
from services.router.roster import Roster
from wire import codec
from wire.v1 import worker_pb2 as pb

PRINT = fingerprint("tok")
MODEL = StepModel(a=0.01, b=0.001, num_steps=40)
BLOCKS = [900 + i for i in range(20)]


def roster(decode: int, prefill: int) -> Roster:
    book = Roster("tok", silence_s=10, rng=random.Random(0))
    for name in [*(f"d{i}" for i in range(decode)), *(f"p{i}" for i in range(prefill))]:
        book.add(name)
        said = pb.Hello(
            worker_id=name,
            incarnation=name,
            role="decode" if name.startswith("d") else "prefill",
            fingerprint=codec.fingerprint_to_wire(PRINT),
            total_blocks=512,
            max_num_seqs=8,
            max_num_batched_tokens=128,
        )
        book.hello(name, said, now=0)
        ready(book, name)
    return book


def ready(book: Roster, name: str, **state: Any) -> None:
    models = codec.step_model_to_wire(MODEL)
    book.state(name, pb.State(phase="ready", prefill_model=models, decode_model=models, **state), now=0)


def holds(book: Roster, name: str, blocks: list[int]) -> None:
    told = pb.TierChanges(tier="device", stored=blocks)
    assert book.kv(name, pb.KvEvents(next=1, snapshot=True, tiers=[told]))


def decide(book: Roster, tokens: int, forced: Forced = Forced.AUTO, **given):
    view = book.fleet_view(1, BLOCKS, tokens + 1, tokens // 16 * 16, **given)
    rng = random.Random(1)
    return plan(RequestFacts(tokens), view, forced, targets=Targets(), min_remote_tokens=64, rng=rng)


def test_of_a_large_fleet_a_few_are_looked_at_and_who_holds_the_prompt_is_one():
    book = roster(decode=150, prefill=150)
    holds(book, "d99", BLOCKS)
    holds(book, "p77", BLOCKS[:10])
    for _ in range(20):
        view = book.fleet_view(1, BLOCKS, 321, 320)
        assert len(view.decode) + len(view.prefill) < 24
        assert view.found == {"d99": {"device": 20}, "p77": {"device": 10}}
    assert decide(book, 321).decode.worker_id == "d99"
    assert decide(book, 321, without={"d99"}).decode.worker_id != "d99"
    ready(book, "d99", running=8, waiting=40)
    assert decide(book, 321).decode.worker_id != "d99"
    book.lost("d99", "gone")
    assert set(book.fleet_view(1, BLOCKS).found) == {"p77"}


def test_a_burst_on_a_large_fleet_is_spread():
    book = roster(decode=100, prefill=100)
    for number in range(300):
        made = decide(book, 321, Forced.DISAGGREGATED)
        book.assigned(f"r{number}", made.work)
    loads = [book.members[f"{role}{i}"].unseen.sequences for role in "dp" for i in range(100)]
    assert sum(loads) == 600
    assert max(loads) <= 6


def test_a_silent_worker_and_one_that_drains_are_not_looked_at():
    book = roster(decode=2, prefill=1)
    book.state("d0", pb.State(phase="draining"), now=1)
    assert [worker.worker_id for worker in book.fleet_view(1).decode] == ["d1"]
    assert book.fleet_view(11).decode == book.fleet_view(11).prefill == ()


def test_a_worker_at_two_addresses_is_one():
    book = roster(decode=1, prefill=0)
    said = book.members["d0"].hello
    assert said is not None
    book.add("other")
    book.hello("other", said, now=0)
    book.state("other", pb.State(phase="ready"), now=0)
    assert len(book.fleet_view(1).decode) == 1
    book.assigned("r", {"d0": Sent(2, 30)})
    assert [worker.load for worker in book.fleet_view(1).decode] == [2]
    book.lost("d0", "gone")
    assert [worker.worker_id for worker in book.fleet_view(1).decode] == ["d0"]
    book.lost("other", "gone")
    assert book.fleet_view(1).decode == ()
    assert book.reference is None


@pytest.mark.parametrize("forced", [Forced.AUTO, Forced.DISAGGREGATED])
def test_what_a_decode_worker_is_told_of_its_prefill_worker(forced):
    book = roster(decode=1, prefill=1)
    holds(book, "p0", BLOCKS[:10])
    ready(book, "p0", queued_tokens=100)
    made = decide(book, 321, forced)
    told = target(made)
    assert told is not None
    assert (told.worker_id, told.incarnation, told.cached_blocks) == ("p0", "p0", 10)
    assert (told.min_tokens > 64) if forced is Forced.AUTO else (told.min_tokens == 1)
    assert told.token_s == pytest.approx((2 * 0.01 + 160 * 0.001) / 160)
    assert told.queue_s == pytest.approx(0.01 + 100 * 0.001)
    assert target(decide(book, 321, Forced.LOCAL)) is None


def test_speeds_that_nobody_measured_are_not_passed_on():
    book = roster(decode=1, prefill=1)
    book.state("p0", pb.State(phase="ready"), now=0)
    told = target(decide(book, 321))
    assert told is not None
    assert told.token_s == 0
