"""Who holds a prompt's prefix gets it: from the workers' events and speeds to the plan, and into /v1/cluster."""

from __future__ import annotations

import pytest
from router_fakes import fingerprint

from core.blocks import block_key, hash_blocks
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


def test_credit_follows_events_and_measured_speeds():
    book, blocks = roster("decode", "decode", "prefill"), keys(PRINT)
    tells(book, 0, device=blocks[:4], host=blocks[2:10], disk=blocks[:20])
    tells(book, 2, redis=blocks)
    assert book.credits(blocks) == {"0a": 64, "1a": 0, "2a": 0}, "the tiers' speeds are not known yet"
    tiers = [pb.TierState(tier="host", token_s=0.0002), pb.TierState(tier="disk", token_s=0.001)]
    book.state("h:0", pb.State(phase="ready", prefill_token_s=0.002, tiers=tiers), now=1)
    book.state("h:2", pb.State(phase="ready", tiers=[pb.TierState(tier="redis", token_s=0.0009)]), now=1)
    credits = book.credits(blocks)
    assert credits["0a"] == pytest.approx(4 * 16 + 6 * 16 * 0.9 + 10 * 16 * 0.5)
    assert credits["2a"] == pytest.approx(320 * 0.1)
    assert book.credits([1, *blocks])["0a"] == 0
    book.lost("h:0", "gone")
    assert "0a" not in book.credits(blocks)


def test_what_was_sent_lately_outlives_the_requests_and_fades():
    book = roster("decode", "decode", "prefill")
    book.assigned({"0a", "2a"}, 2)
    book.state("h:0", pb.State(phase="ready"), now=1)  # both are over
    views = {w.incarnation: w for w in (*book.fleet_view(1).decode, *book.fleet_view(1).prefill)}
    assert [(views[i].load, views[i].recent) for i in ("0a", "1a", "2a")] == [(0, 2), (0, 0), (2, 2)]
    for _ in range(200):
        book.assigned({"1a"}, 1)
    assert book.members["h:0"].recent < 0.01
    assert 31 < book.members["h:1"].recent <= 32
    assert book.members["h:2"].recent == 2, "the other pool's count does not fade with this one's requests"


def test_a_worker_that_joins_is_not_flooded():
    book = roster("decode", "decode")
    for number in (0, 1) * 100:
        book.assigned({f"{number}a"}, 1)
    join(book, 1, life="b")
    assert book.members["h:1"].recent == book.members["h:0"].recent > 10


async def test_a_prompt_goes_where_its_prefix_is(stack_of):
    """1. Nobody has it.  2. decode-1 has it in host RAM.  3. Another tenant's salt: nobody."""
    async with stack_of(decode=2) as stack:
        second = stack.workers[1]
        blocks = keys(second.print)
        tiers = [
            pb.TierState(tier="host", token_s=0.0001, used_bytes=7, capacity_bytes=9, blocks=20, hit_blocks=3)
        ]
        second.change(prefill_token_s=0.001, tiers=tiers)
        second.tell(pb.KvEvents(next=1, snapshot=True, tiers=[pb.TierChanges(tier="host", stored=blocks)]))
        book = stack.router.fleet.roster
        await stack.until(lambda: book.credits(blocks).get(second.incarnation, 0) > 0)

        async def ask(salt: str) -> str:
            body = {"model": stack.model, "prompt": IDS, "max_tokens": 1, "cache_salt": salt}
            return (await stack.http.post("/v1/completions", json=body)).headers["x-baton-decode"]

        assert {await ask("") for _ in range(3)} == {"decode-1"}
        assert {await ask("other") for _ in range(3)} == {"decode-0"}, "the less busy one"
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
        assert fleet.roster.credits(blocks) == {worker.incarnation: 0}
        worker.tell(pb.KvEvents(next=6, snapshot=True, tiers=changes))
        await stack.until(lambda: noted(fleet.roster.credits(blocks)[worker.incarnation] > 0))
        assert seen == {"ready", 1}
        assert not fleet.connections_lost.total()
