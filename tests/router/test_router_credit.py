"""Who holds a prompt's prefix gets it: from the workers' events and speeds to the plan, and into /v1/cluster."""

from __future__ import annotations

import random
from collections import Counter

import pytest
from router_fakes import fingerprint

from core.blocks import block_key, hash_blocks
from core.step_model import GUESSED_DECODE, StepModel
from planning.estimate import Targets
from planning.plan import Forced, RequestFacts, plan
from planning.worker_view import Sent
from services.router.placed import Placed
from services.router.roster import Roster
from wire import codec
from wire.v1 import worker_pb2 as pb

PRINT = fingerprint("tok")
IDS = list(range(500, 500 + 16 * 20))


def keys(print_, ids: list[int] = IDS, salt: str = "") -> list[int]:
    return [block_key(each) for each in hash_blocks(print_.namespace, ids, 16, salt)]


def roster(*roles: str) -> Roster:
    book = Roster("tok", silence_s=10)
    for i, role in enumerate(roles):
        book.add(f"h:{i}")
        join(book, i, role)
    return book


def join(book: Roster, number: int, role: str = "decode", life: str = "a") -> None:
    address, print_ = f"h:{number}", codec.fingerprint_to_wire(PRINT)
    said = pb.Hello(
        worker_id=f"w{number}", incarnation=f"{number}{life}", role=role, fingerprint=print_, total_blocks=100
    )
    book.hello(address, said, now=0)
    book.state(address, pb.State(phase="ready"), now=0)


def tells(book: Roster, number: int, **tiers: list[int]) -> None:
    changes = [pb.TierChanges(tier=tier, stored=held) for tier, held in tiers.items()]
    assert book.kv(f"h:{number}", pb.KvEvents(next=1, snapshot=True, tiers=changes))


def test_what_each_worker_holds_and_how_fast_its_tiers_are_reach_the_planner():
    book, blocks = roster("decode", "decode", "prefill"), keys(PRINT)
    tells(book, 0, device=blocks[:4], host=blocks[2:10], disk=blocks[:20])
    tells(book, 2, redis=blocks)
    assert book.fleet_view(0, blocks).found == {
        "0a": {"device": 4, "host": 6, "disk": 10},
        "2a": {"redis": 20},
    }
    tiers = [
        pb.TierState(tier="host", token_s=0.0002),
        pb.TierState(tier="redis", token_s=0.001, breaker="open"),
    ]
    links = [pb.Link(peer="2a", nbytes_per_s=3e9)]
    model = pb.StepModel(a=0.01, b=0.0005, c=1e-7, num_steps=9)
    book.state("h:0", pb.State(phase="ready", prefill_model=model, tiers=tiers, links=links), now=1)
    [view] = [each for each in book.fleet_view(1).decode if each.incarnation == "0a"]
    assert view.tier_token_s == {"host": 0.0002}
    assert view.link_nbytes_per_s == {"2a": 3e9}
    assert (view.prefill_model, view.decode_model) == (StepModel(0.01, 0.0005, 1e-7, 9), GUESSED_DECODE)
    assert "0a" not in book.fleet_view(1, [1, *blocks]).found
    book.lost("h:0", "gone")
    assert set(book.fleet_view(1, blocks).found) == {"2a"}


def test_what_was_sent_lately_outlives_the_requests_and_fades():
    book = roster("decode", "decode", "prefill")
    book.assigned("r", {"0a": Sent(2), "2a": Sent(2)})
    book.state("h:0", pb.State(phase="ready", taken=["r"]), now=1)  # both are over
    assert [worker.load for worker in book.fleet_view(1).decode] == [0, 0]
    assert book.fleet_view(1).recent == {"0a": 2, "1a": 0, "2a": 2}
    for _ in range(200):
        book.assigned("s", {"1a": Sent(1)})
    recent = book.fleet_view(1).recent
    assert recent["0a"] < 0.01
    assert 31 < recent["1a"] <= 32
    assert recent["2a"] == 2, "the other pool's count does not fade with this one's requests"


def test_a_worker_that_joins_is_not_flooded():
    book = roster("decode", "decode")
    for number in (0, 1) * 100:
        book.assigned("r", {f"{number}a": Sent(1)})
    join(book, 1, life="b")
    recent = book.fleet_view(1).recent
    assert recent["1b"] == recent["0a"] > 10


@pytest.mark.parametrize(("slower", "at_least"), [(1.0, 25), (1.3, 15), (2.0, 5)])
@pytest.mark.parametrize("forced", [Forced.LOCAL, Forced.DISAGGREGATED])
def test_a_restarted_worker_gets_its_share_though_it_seems_slower(forced, slower, at_least):
    """It measured itself while it started, on a busy machine perhaps, and learns better only by working. The
    requests come one by one: neither worker ever has a queue."""
    book, rng = roster("decode", "decode", "prefill"), random.Random(0)

    def tells(number: int, factor: float) -> None:
        told = codec.step_model_to_wire(StepModel(0.02 * factor, 0.001 * factor, 1e-7, 50))
        book.state(f"h:{number}", pb.State(phase="ready", prefill_model=told, decode_model=told), now=0)

    def served(count: int) -> Counter[str]:
        by_worker = Counter[str]()
        for number in range(count):
            facts, view = RequestFacts(600), book.fleet_view(1)
            made = plan(facts, view, forced, targets=Targets(), min_remote_tokens=64, rng=rng)
            Placed(book, f"r{number}", made, 1, lambda: 1.0).over()
            by_worker[made.decode.incarnation] += 1
        return by_worker

    for number in (0, 1, 2):
        tells(number, 1.0)
    assert min(served(60).values()) > 20
    book.lost("h:1", "killed")
    join(book, 1, life="b")
    tells(1, slower)
    shares = served(60)
    assert at_least <= shares["1b"] <= 35


async def test_a_prompt_goes_where_its_prefix_is(stack_of):
    """1. Nobody has it.  2. decode-1 has it in host RAM.  3. Another tenant's salt: nobody."""
    async with stack_of(decode=2) as stack:
        second = stack.workers[1]
        blocks = keys(second.print)
        tiers = [
            pb.TierState(tier="host", token_s=0.0001, used_bytes=7, capacity_bytes=9, blocks=20, hit_blocks=3)
        ]
        second.change(tiers=tiers)
        second.tell(pb.KvEvents(next=1, snapshot=True, tiers=[pb.TierChanges(tier="host", stored=blocks)]))
        await stack.until(lambda: second.incarnation in stack.router.fleet.view(blocks).found)

        async def ask(salt: str) -> str:
            body = {"model": stack.model, "prompt": IDS, "max_tokens": 1, "cache_salt": salt}
            return (await stack.http.post("/v1/completions", json=body)).headers["x-baton-decode"]

        assert {await ask("") for _ in range(3)} == {"decode-1"}
        assert await ask("other") == "decode-0", "the less busy one"
        listed = (await stack.http.get("/v1/cluster")).json()["workers"]
        assert {worker["id"]: worker["tiers"] for worker in listed} == {
            "decode-0": {},
            "decode-1": {
                "host": {
                    "used_bytes": 7,
                    "capacity_bytes": 9,
                    "blocks": 20,
                    "hit_blocks": 3,
                    "breaker": None,
                }
            },
        }


async def test_missed_news_costs_credit_and_not_the_worker(stack_of):
    """1. News 5 comes, of 0 to 4 nothing was heard. 2. The stream begins anew, the worker stays in use.
    3. A snapshot: its blocks are known again."""
    async with stack_of(decode=1) as stack:
        worker, fleet = stack.worker, stack.router.fleet
        blocks = keys(worker.print)
        changes = [pb.TierChanges(tier="device", stored=blocks)]
        seen = set()

        def noted(condition: bool) -> bool:
            seen.update(stack.states().values())
            seen.add(stack.up())
            return condition

        worker.tell(pb.KvEvents(first=5, next=6, tiers=changes))
        await stack.until(lambda: noted(worker.watches > 2))
        assert not fleet.view(blocks).found
        worker.tell(pb.KvEvents(next=6, snapshot=True, tiers=changes))
        await stack.until(lambda: noted(worker.incarnation in fleet.view(blocks).found))
        assert seen == {"ready", 1}
        assert not fleet.connections_lost.total()
