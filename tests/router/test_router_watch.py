"""What a router makes of its workers' streams: whatever is lost, doubled or late, it ends with the truth."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from hypothesis import given, settings
from hypothesis import strategies as st
from router_fakes import FakeWorker, fingerprint

from core.blocks import block_key
from core.clock import Clock, FakeClock, monotonic
from core.request import Role
from core.settings import Settings
from planning.prefix_index import TIERS, Changes, PrefixIndex
from services.router.fleet import FIRST_RETRY_S, Fleet, pause_after
from services.router.roster import Roster
from services.router.router import MAX_SHOWN, Router
from services.router.standing import WorkerState
from services.router.text import TextSide
from services.worker.kv_events import KVEventLog
from wire import codec
from wire.v1 import worker_pb2 as pb

HASHES = [bytes([number]) * 32 for number in range(4)]
PRINT = fingerprint("tok")

changes = st.tuples(st.sampled_from(["store", "evict"]), st.sampled_from(TIERS[:2]), st.sampled_from(HASHES))
tells = st.sampled_from([("tell", "", b""), ("tell", "", b""), ("watch", "", b"")])
arrivals = st.tuples(st.just("arrive"), st.integers(0, 20), st.just(b""))
stories = st.lists(st.one_of(changes, changes, tells, arrivals, arrivals), min_size=10, max_size=60)


def held(index: PrefixIndex) -> dict[bytes, str]:
    """The cheapest tier of each block, as the router knows it."""
    found = {each: index.leading("h:0", [block_key(each)]) for each in HASHES}
    return {each: next(iter(tiers)) for each, tiers in found.items() if tiers}


def arrive(index: PrefixIndex, news: pb.KvEvents) -> bool:
    tiers = [Changes(each.tier, each.stored, each.evicted) for each in news.tiers]
    return index.apply("h:0", news.first, news.next, news.snapshot, tiers)


@settings(max_examples=300, deadline=None)
@given(stories, st.sampled_from([1, 100]))
def test_any_order_of_news_ends_in_the_truth(story: list[tuple[str, str | int, bytes]], limit: int) -> None:
    """A worker changes its tiers and tells two streams; messages arrive in any order, often or never. At each
    moment the router knows nothing, or exactly what was true at the latest change that it heard of. After a
    snapshot it knows the truth."""
    log, index = KVEventLog(limit), PrefixIndex()
    truth: set[tuple[str, bytes]] = set()
    history = [dict[bytes, str]()]  # what was true after so many changes
    said: list[pb.KvEvents] = []
    cursor: int | None = None
    known: int | None = None

    for what, arg, block in story:
        match what:
            case "store" | "evict":
                assert isinstance(arg, str)
                stores, before = what == "store", len(truth)
                log.report(arg, [block] if stores else [], [] if stores else [block])
                truth = truth | {(arg, block)} if stores else truth - {(arg, block)}
                if len(truth) != before:
                    cheapest = {b: t for t in reversed(TIERS) for (tier, b) in truth if tier == t}
                    history.append(cheapest)
            case "watch":
                cursor = None
            case "tell":
                news, cursor = log.since(cursor)
                said += [news] if news is not None else []
            case "arrive" if said:
                assert isinstance(arg, int)
                news = said[arg % len(said)]
                gap = not news.snapshot and (known is None or news.first > known)
                assert arrive(index, news) is not gap
                known = None if gap else max(known or 0, news.next)
                assert held(index) == ({} if known is None else history[known])
    news, _ = log.since(None)
    assert news is not None
    assert arrive(index, news)
    assert held(index) == history[-1]


def hello(life: str, role: str = "decode", worker_id: str = "w") -> pb.Hello:
    print_ = codec.fingerprint_to_wire(PRINT)
    return pb.Hello(worker_id=worker_id, incarnation=life, role=role, fingerprint=print_, total_blocks=100)


def book_of(*lives: str) -> Roster:
    """Workers at h:0, h:1 ... that are ready and hold the first of HASHES."""
    book = Roster("tok", silence_s=10)
    for number, life in enumerate(lives):
        book.add(f"h:{number}")
        join(book, number, hello(life))
    return book


def join(book: Roster, number: int, said: pb.Hello) -> None:
    book.hello(f"h:{number}", said, now=0)
    book.state(f"h:{number}", pb.State(phase="ready"), now=0)
    stored = [pb.TierChanges(tier="device", stored=[block_key(HASHES[0])])]
    assert book.kv(f"h:{number}", pb.KvEvents(next=1, snapshot=True, tiers=stored))


def states(book: Roster) -> list[str]:
    return [book.status(member, now=1)[0].value for member in book.members.values()]


def view_of(book: Roster) -> tuple[list[str], list[str]]:
    """Incarnations that decode, and that prefill."""
    view = book.fleet_view(1)
    return [each.incarnation for each in view.decode], [each.incarnation for each in view.prefill]


def known_blocks(book: Roster, life: str) -> dict[str, int]:
    return dict(book.fleet_view(1, [block_key(HASHES[0])]).found.get(life, {}))


def test_a_worker_at_two_addresses_is_one():
    """1. Discovered twice, as by IPv4 and IPv6.  2. The stream at the first ends: the second is used, with
    what was told there.  3. The first comes back: nothing moves.  4. Both end: it is gone."""
    book = book_of("life", "life", "other")
    assert states(book) == ["ready", "duplicate", "ready"]
    assert view_of(book) == (["life", "other"], [])
    assert book.lost("h:0", "reset")
    assert states(book) == ["lost", "ready", "ready"]
    assert sorted(view_of(book)[0]) == ["life", "other"]
    assert known_blocks(book, "life") == {"device": 1}
    join(book, 0, hello("life"))
    assert states(book) == ["duplicate", "ready", "ready"]
    book.remove("h:1")
    assert states(book) == ["ready", "ready"]
    assert book.lost("h:0", "reset")
    assert view_of(book) == (["other"], [])


def test_a_worker_that_restarts_on_its_address_begins_anew():
    """Its blocks and its load are those of the new life; the old one is nowhere."""
    book = book_of("old")
    book.state("h:0", pb.State(phase="ready", running=5), now=0)
    book.hello("h:0", hello("new"), now=1)
    assert states(book) == ["connecting"]
    book.state("h:0", pb.State(phase="ready"), now=1)
    assert view_of(book) == (["new"], [])
    assert book.members["h:0"].load == 0
    assert known_blocks(book, "new") == {}
    assert book.at("old") is None
    assert not book.kv("h:0", pb.KvEvents(first=1, next=2)), "the numbers of the old life mean nothing"


def test_an_address_that_moves_to_another_worker():
    book = book_of("a", "b")
    assert book.lost("h:0", "reset")
    join(book, 0, hello("c", worker_id="another"))
    assert sorted(view_of(book)[0]) == ["b", "c"]
    assert book.at("a") is None
    assert book.members["h:0"].worker_id == "another"


def test_a_worker_that_moves_to_another_address():
    """The new address is discovered before the old one is given up; it counts once all the time."""
    book = book_of("life", "life")
    book.lost("h:0", "gone")
    book.remove("h:0")
    assert view_of(book) == (["life"], [])
    assert states(book) == ["ready"]


def test_a_change_of_role_moves_the_worker_and_keeps_what_is_known_of_it():
    """Another Hello of the same life: out of one pool, into the other, without a gap in its news."""
    book = book_of("a", "b")
    book.hello("h:0", hello("a", role="prefill"), now=1)
    assert view_of(book) == (["b"], ["a"])
    assert states(book) == ["ready", "ready"]
    assert known_blocks(book, "a") == {"device": 1}
    assert book.kv("h:0", pb.KvEvents(first=1, next=2, tiers=[]))
    book.hello("h:0", hello("a"), now=2)
    assert sorted(view_of(book)[0]) == ["a", "b"]


class Told:
    """A discovery that says what it is told to."""

    def __init__(self, *addresses: str) -> None:
        self._sets: asyncio.Queue[frozenset[str]] = asyncio.Queue()
        self.say(*addresses)

    def say(self, *addresses: str) -> None:
        self._sets.put_nowait(frozenset(addresses))

    async def watch(self, count_fault: Callable[[str], None]) -> AsyncIterator[frozenset[str]]:
        while True:
            yield await self._sets.get()


@asynccontextmanager
async def following(found: Told, *workers: FakeWorker, clock: Clock = monotonic) -> AsyncIterator[Fleet]:
    faults: Counter[str] = Counter()
    fleet = Fleet(found, "tok", silence_s=10, count_fault=lambda where: faults.update([where]), clock=clock)
    running = asyncio.create_task(fleet.run())
    try:
        yield fleet
        assert not running.done()
        assert not faults
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        for worker in workers:
            await worker.stop()


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(5):
        while not condition():
            await asyncio.sleep(0.005)


def decoding(fleet: Fleet) -> set[str]:
    return {worker.incarnation for worker in fleet.view().decode}


async def started(*names: str) -> list[FakeWorker]:
    workers = [FakeWorker(PRINT, worker_id=name) for name in names]
    for worker in workers:
        await worker.start()
    return workers


async def test_a_worker_that_is_no_longer_discovered_is_followed_to_its_end():
    """1. Two workers.  2. The name server forgets both: they are used on, on the same streams.  3. One ends:
    it is dropped.  4. The other is discovered again: it was there all the time."""
    a, b = await started("a", "b")
    found = Told(a.address, b.address)
    async with following(found, a, b) as fleet:
        await until(lambda: decoding(fleet) == {a.incarnation, b.incarnation})
        session = fleet.session(b.incarnation)
        found.say()
        found.say("127.0.0.1:9")  # nobody is there; it shows that the one before was taken over
        await until(lambda: "127.0.0.1:9" in fleet.roster.members)
        assert decoding(fleet) == {a.incarnation, b.incarnation}
        await a.stop()
        await until(lambda: a.address not in fleet.roster.members)
        assert decoding(fleet) == {b.incarnation}
        found.say(b.address)
        await until(lambda: fleet.roster.members.keys() == {b.address})
        assert decoding(fleet) == {b.incarnation}
        assert fleet.session(b.incarnation) is session
        assert b.watches == 1


async def test_a_worker_that_restarts_or_moves_is_used_anew_without_a_word_from_discovery():
    """The same address: another life of the worker, then another worker."""
    (a,) = await started("a")
    async with following(Told(a.address), a) as fleet:
        lives = set()
        for name in ("a", "a", "z"):
            a._worker_id = name
            if lives:
                await a.stop()
                await a.start()
            await until(lambda: decoding(fleet) == {a.incarnation})
            lives.add(a.incarnation)
            (member,) = fleet.roster.members.values()
            assert member.worker_id == name
        assert len(lives) == 3
        assert fleet.connections_lost[Role.DECODE] == 2


async def test_two_addresses_of_one_worker_are_one_and_nothing_is_wrong_with_that(text: TextSide):
    (a,) = await started("a")
    router = Router(Settings())
    port = a.address.rpartition(":")[2]
    found = Told(a.address, f"localhost:{port}")
    async with following(found, a) as fleet:
        await until(lambda: {s.value for _, s, _ in fleet.workers()} == {"ready", "duplicate"})
        assert decoding(fleet) == {a.incarnation}
        assert fleet.session(a.incarnation) is not None
        assert [link.session.up for link in fleet._links.values()].count(True) == 1
        router.text, router.fleet = text, fleet
        assert router.readiness() == (True, [])
        (used,) = (member.address for member, state, _ in fleet.workers() if state is WorkerState.READY)
        fleet.roster.lost(used, "reset")
        fleet._settle()
        await until(lambda: all(link.session.up for link in fleet._links.values()))
        assert fleet.roster.at(a.incarnation) is not fleet.roster.members[used]


async def test_a_router_that_stood_still_blames_no_worker():
    """1. The router stops for an hour: nobody is silent.  2. It runs, and hears nothing for longer than a worker
    may be silent: that one is."""
    (a,) = await started("a")
    clock = FakeClock()
    async with following(Told(a.address), a, clock=clock) as fleet:
        await until(lambda: decoding(fleet) == {a.incarnation})
        clock.advance(3600)
        assert decoding(fleet) == {a.incarnation}
        assert fleet.counts()[Role.DECODE, WorkerState.READY] == 1
        for _ in range(30):  # without a turn of the loop, hence without a State
            clock.advance(0.5)
            fleet._settle()
        assert decoding(fleet) == set()
        assert fleet.expects_decode()
        assert [state for _, state, _ in fleet.workers()] == [WorkerState.SILENT]


def test_pauses_grow_until_a_stream_has_lasted():
    """Also where each one ends since news was missed."""
    pauses = [FIRST_RETRY_S]
    for lasted_s in (0, 0, 0, 0, 0, 0, 3600, 0):
        pauses.append(pause_after(lasted_s, pauses[-1]))
    assert pauses == [0.05, 0.1, 0.2, 0.4, 0.8, 1.0, 1.0, 0.05, 0.1]


happens = st.tuples(
    st.sampled_from(["add", "remove", "hello", "state", "state", "lost", "session", "wait"]),
    st.integers(0, 3),
    st.integers(0, 5),
)


@settings(max_examples=200, deadline=None)
@given(st.lists(happens, min_size=5, max_size=60))
def test_counts_of_workers_are_those_of_a_look_at_each(story: list[tuple[str, int, int]]) -> None:
    """Whatever comes, in any order: three lives in either role, of two kinds, at four addresses."""
    book, now = Roster("tok", silence_s=10), 0.0
    prints = [PRINT, fingerprint("tok", block_size=32), fingerprint("another")]
    changed: set[str] = set()
    before: dict[str, tuple[str, WorkerState]] = {}
    for what, number, kind in story:
        address, member = f"h:{number}", book.members.get(f"h:{number}")
        match what:
            case "wait":
                now += (0.1, 3.0, 30.0)[kind % 3]
            case "add" if member is None:
                book.add(address)
            case "remove" if member is not None:
                book.remove(address)
            case "hello" if member is not None:
                said = hello(f"life {kind % 3}", ("decode", "prefill")[kind // 3])
                said.fingerprint.CopyFrom(codec.fingerprint_to_wire(prints[kind % 3]))
                book.hello(address, said, now)
            case "state" if member is not None and member.connected:
                phase, idle_s = ("ready", "ready", "draining")[kind % 3], (0, 20)[kind == 5]
                book.state(address, pb.State(phase=phase, idle_s=idle_s), now)
            case "lost" if member is not None:
                book.lost(address, "reset")
            case "session":
                book.session(address, bool(kind % 2))
        changed.update(book.changes(now))
        seen = {a: (m.role, book.status(m, now)[0]) for a, m in book.members.items()}
        assert +book.counts(now) == Counter(seen.values())
        fine = (WorkerState.READY, WorkerState.DUPLICATE)
        assert set(book.amiss(now)) == {a for a, (_, state) in seen.items() if state not in fine}
        assert changed >= {a for a, standing in seen.items() if before.get(a) != standing}
        ready = {a for a, (role, state) in seen.items() if (role, state) == ("decode", WorkerState.READY)}
        assert len(book.fleet_view(now).decode) == sum(book.members[a].has_session for a in ready)
        changed, before = set(), seen


def test_of_many_workers_some_are_shown(text: TextSide):
    """1. Of 300 two thirds are lost: a hundred of them are named, and how many more there are.  2. All come."""
    router = Router(Settings())
    router.text, router.fleet = text, (fleet := Fleet(Told(), "tok", 10, lambda where: None))
    for number in range(300):
        fleet.roster.add(f"h:{number}")
        join(fleet.roster, number, hello(f"life {number}"))
        if number % 3:
            fleet.roster.lost(f"h:{number}", "reset")
    ready, problems = router.readiness()
    assert ready
    assert len(problems) == MAX_SHOWN + 1
    assert problems[-1] == "100 more workers are not ready; /v1/cluster has all of them"
    states = Counter(state for _, state, _ in fleet.some(MAX_SHOWN + 150))
    assert states == {WorkerState.LOST: 200, WorkerState.READY: 50}
    for number in range(300):
        join(fleet.roster, number, hello(f"life {number}"))
    assert router.readiness() == (True, [])
    assert len(fleet.some(MAX_SHOWN)) == MAX_SHOWN


async def test_a_gap_in_the_news_costs_a_snapshot_and_nothing_else():
    """1. A worker with a block.  2. Its news skips a number: another stream, while the worker stays ready."""
    (a,) = await started("a")
    stored = [pb.TierChanges(tier="device", stored=[block_key(HASHES[0])])]
    a.tell(pb.KvEvents(next=1, snapshot=True, tiers=stored))
    async with following(Told(a.address), a) as fleet:
        await until(lambda: decoding(fleet) == {a.incarnation})
        await until(lambda: known_blocks(fleet.roster, a.incarnation) == {"device": 1})
        session = fleet.session(a.incarnation)
        a.tell(pb.KvEvents(first=5, next=6))
        await until(lambda: a.watches >= 2)
        assert decoding(fleet) == {a.incarnation}
        a.tell(pb.KvEvents(next=6, snapshot=True, tiers=stored))
        await until(lambda: known_blocks(fleet.roster, a.incarnation) == {"device": 1})
        assert fleet.session(a.incarnation) is session
        assert not any(fleet.connections_lost.values())


async def test_a_change_of_role_opens_a_session_and_closes_none_that_is_in_use():
    """1. It decodes.  2. It prefills: no new request goes there, what runs goes on.  3. It decodes again."""
    (a,) = await started("a")
    async with following(Told(a.address), a) as fleet:
        await until(lambda: decoding(fleet) == {a.incarnation})
        session = fleet.session(a.incarnation)
        a.become("prefill")
        await until(lambda: {w.incarnation for w in fleet.view().prefill} == {a.incarnation})
        assert decoding(fleet) == set()
        assert session is not None
        assert session.up
        a.become("decode")
        await until(lambda: decoding(fleet) == {a.incarnation})
        assert a.watches == 1


async def test_a_worker_that_begins_as_prefill_gets_a_session_when_it_decodes():
    worker = FakeWorker(PRINT, worker_id="p", role="prefill")
    await worker.start()
    async with following(Told(worker.address), worker) as fleet:
        await until(lambda: len(fleet.view().prefill) == 1)
        assert fleet.session(worker.incarnation) is None
        worker.become("decode")
        await until(lambda: decoding(fleet) == {worker.incarnation})


async def test_a_role_that_nobody_knows_ends_the_stream_with_a_sentence():
    (a,) = await started("a")
    async with following(Told(a.address), a) as fleet:
        await until(lambda: decoding(fleet) == {a.incarnation})
        a.become("referee")
        await until(lambda: any(s is WorkerState.LOST for _, s, _ in fleet.workers()))
        (reason,) = [why for _, _, why in fleet.workers()]
        assert "neither prefill nor decode" in reason
