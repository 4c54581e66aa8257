"""Where a router finds workers: URLs, DNS, what a series of answers amounts to."""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import sys
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import dns.asyncresolver
import dns.message
import dns.rcode
import dns.rrset
import pytest

from core.clock import FakeClock
from core.errors import ConfigError, Unavailable
from core.settings import Settings
from services import discovery
from services.discovery.dns import HostLookup, SrvLookup, lookup
from services.discovery.polled import Polled, Settled

NOBODY: frozenset[str] = frozenset()
A, AB = frozenset({"a:1"}), frozenset({"a:1", "b:1"})


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("", "--discovery static://host:port"),
        ("static://", "names no worker"),
        ("static://host", "not host:port"),
        ("static://:1", "not host:port"),
        ("static://h:99999", "not host:port"),
        ("static://h:0", "names no port"),
        ("dns://x", "dns://name:port"),
        ("dns://x:0", "dns://name:port"),
        ("dns://:7", "dns://name:port"),
        ("ray://", "RAY_ADDRESS"),
        ("ray://head", "not host:port"),
        ("redis://h:no", "cannot be read"),
        ("redis://h?socket_timeout=x", "cannot be read"),
        ("carrier-pigeon://x", "known: static://, dns://"),
        ("redis:/x", "known: static://, dns://"),
    ],
)
def test_urls_that_cannot_work_are_sentences(url: str, words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    with pytest.raises(ConfigError, match=words):
        discovery.from_settings(Settings(discovery=url))


@pytest.mark.parametrize("scheme", ["redis", "rediss", "rdis", "unix"])
@pytest.mark.parametrize(
    "rest", [":canary@h:1", "u:canary@h:no", "h:1?password=canary", ":canary@/x?db=y", "u:canary/@h:1"]
)
def test_a_password_is_in_no_sentence_and_no_name(scheme: str, rest: str) -> None:
    said = ""
    try:
        polled = discovery.from_settings(Settings(discovery=f"{scheme}://{rest}"))
        said = polled.source.name if isinstance(polled, Polled) else ""
    except ConfigError as error:
        said = error.message
    assert said
    assert "canary" not in said


def test_baton_config_shows_no_password() -> None:
    secret = {"BATON_DISCOVERY": "redis://u:canary@h/0?password=canary&db=1"}
    shown = subprocess.check_output(
        [sys.executable, "-m", "services.cli", "config"], env=os.environ | secret, text=True
    )
    assert "canary" not in shown
    assert "redis://***@h/0?password=***&db=1" in shown


async def test_a_static_list_is_told_once() -> None:
    found = discovery.from_settings(Settings(discovery="static://a:1, [::1]:2,a:1"))
    assert [each async for each in found.watch(print)] == [frozenset({"a:1", "[::1]:2"})]


@pytest.mark.parametrize("url", ["", "static://a:1", "dns://x:7"])
def test_workers_announce_themselves_only_where_that_is_needed(url: str) -> None:
    assert discovery.announcement_for(Settings(discovery=url, advertise="a:1")) is None


def test_an_empty_answer_counts_after_the_grace() -> None:
    """1. Nobody at first: believed.  2. Two workers.  3. Nobody, for less than the grace: not believed.
    4. One of them: believed at once.  5. Nobody until the grace is over: believed.  6. And still nobody."""
    settled = Settled(grace_s=10)
    story = [
        (0, NOBODY, NOBODY),
        (1, AB, AB),
        (2, NOBODY, AB),
        (9, NOBODY, AB),
        (10, A, A),
        (19, NOBODY, A),
        (20, NOBODY, NOBODY),
        (21, NOBODY, NOBODY),
    ]
    before = NOBODY
    for now, answer, held in story:
        assert settled.answered(answer, now) is (held != before)
        assert settled.addresses == held
        before = held


def test_an_empty_answer_right_after_an_outage_is_not_believed() -> None:
    """1. Two workers.  2. No answers for longer than the grace.  3. Nobody: not believed, until the grace has
    passed without another failure."""
    settled = Settled(grace_s=10)
    settled.answered(AB, 0)
    for now in (20, 40, 60):
        settled.failed(now)
    for now in (60.1, 69):
        assert not settled.answered(NOBODY, now)
    assert settled.addresses == AB
    assert settled.answered(NOBODY, 70)
    assert settled.addresses == NOBODY


class Scripted:
    """A source that gives these answers, then the last one for ever. None: it does not answer."""

    name = "scripted"

    def __init__(self, *answers: frozenset[str] | None) -> None:
        self.answers = list(answers)
        self.looks = 0
        self.closed = False

    async def addresses(self) -> frozenset[str]:
        self.looks += 1
        answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        if answer is None:
            raise Unavailable("the line is cut")
        return answer

    async def close(self) -> None:
        self.closed = True


async def test_what_fails_keeps_the_last_set_and_is_counted() -> None:
    source, faults = Scripted(None, A, A, None, None, AB), Counter[str]()
    watching = Polled(source, poll_s=0.001, grace_s=10).watch(lambda where: faults.update([where]))
    async with asyncio.timeout(5):
        assert [await anext(watching), await anext(watching)] == [A, AB]
    assert faults == {"discovery": 3}
    await watching.aclose()  # pyright: ignore[reportAttributeAccessIssue]
    assert source.closed


async def test_what_is_no_address_is_left_out_and_counted() -> None:
    source, faults = Scripted(A | {"unix:/etc/passwd", "", "b", "b:0"}), Counter[str]()
    watching = Polled(source, poll_s=0.001, grace_s=10).watch(lambda where: faults.update([where]))
    assert await anext(watching) == A
    assert faults["discovery"] == 1
    await watching.aclose()  # pyright: ignore[reportAttributeAccessIssue]


async def test_a_look_that_hangs_is_not_begun_a_second_time(monkeypatch: pytest.MonkeyPatch) -> None:
    class Hanging(Scripted):
        async def addresses(self) -> frozenset[str]:
            self.looks += 1
            await answered.wait()
            return A

    monkeypatch.setattr("services.discovery.polled.PATIENCE_S", 0.01)
    source, faults, answered = Hanging(), Counter[str](), asyncio.Event()

    def count(where: str) -> None:
        faults[where] += 1
        if faults[where] == 3:
            answered.set()

    watching = Polled(source, poll_s=0.001, grace_s=10).watch(count)
    async with asyncio.timeout(5):
        assert await anext(watching) == A
    assert (source.looks, faults["discovery"]) == (1, 3)
    await watching.aclose()  # pyright: ignore[reportAttributeAccessIssue]


async def test_addresses_of_a_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two IPv4 addresses and an IPv6 one; then no such name; then the server fails."""
    answers: list[object] = [
        [("10.0.0.1", 7), ("10.0.0.2", 7), ("fd00::1", 7, 0, 0)],
        socket.gaierror(socket.EAI_NONAME, "Name or service not known"),
        socket.gaierror(socket.EAI_AGAIN, "Temporary failure in name resolution"),
        UnicodeError("label too long"),
    ]
    asked = []

    async def getaddrinfo(host: str, port: int, **options: int) -> list[tuple[object, ...]]:
        asked.append((host, port, options))
        answer = answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        assert isinstance(answer, list)
        return [(0, 1, 6, "", place) for place in answer]

    monkeypatch.setattr(asyncio.get_running_loop(), "getaddrinfo", getaddrinfo)
    source = lookup("workers.ns:7")
    assert await source.addresses() == {"10.0.0.1:7", "10.0.0.2:7", "[fd00::1]:7"}
    assert asked == [("workers.ns", 7, {"type": socket.SOCK_STREAM})]
    assert await source.addresses() == NOBODY
    for words in ("Temporary failure", "label too long"):
        with pytest.raises(Unavailable, match=words):
            await source.addresses()


async def test_a_name_that_this_host_knows_and_one_that_nobody_knows() -> None:
    assert "127.0.0.1:7001" in await HostLookup("localhost", 7001).addresses()
    try:
        assert await HostLookup("no-such-host.invalid", 1).addresses() == NOBODY
    except Unavailable:
        pass  # without a name server the resolver cannot know that


@asynccontextmanager
async def name_server(answers: dict[str, list[str] | dns.rcode.Rcode]) -> AsyncIterator[int]:
    """SRV answers over UDP, on a port of the loopback."""

    class Server(asyncio.DatagramProtocol):
        def connection_made(self, transport: asyncio.DatagramTransport) -> None:
            self.transport = transport

        def datagram_received(self, data: bytes, addr: tuple[str, int]) -> None:
            query = dns.message.from_wire(data)
            reply = dns.message.make_response(query)
            name = query.question[0].name
            answer = answers.get(str(name).rstrip("."), dns.rcode.NXDOMAIN)
            if isinstance(answer, dns.rcode.Rcode):
                reply.set_rcode(answer)
            elif answer:
                reply.answer.append(dns.rrset.from_text(name, 5, "IN", "SRV", *answer))
            self.transport.sendto(reply.to_wire(), addr)

    loop = asyncio.get_running_loop()
    transport, _ = await loop.create_datagram_endpoint(Server, local_addr=("127.0.0.1", 0))
    try:
        yield transport.get_extra_info("sockname")[1]
    finally:
        transport.close()


async def test_srv_records_bring_the_ports() -> None:
    answers: dict[str, list[str] | dns.rcode.Rcode] = {
        "_grpc._tcp.workers": ["0 50 7001 a.workers.", "0 50 7002 b.workers."],
        "_grpc._tcp.none": [],
        "_grpc._tcp.broken": dns.rcode.SERVFAIL,
    }
    async with name_server(answers) as port:
        resolver = dns.asyncresolver.Resolver(configure=False)
        resolver.nameservers, resolver.port, resolver.search = ["127.0.0.1"], port, []

        def source(name: str) -> SrvLookup:
            return SrvLookup(f"_grpc._tcp.{name}", resolver)

        assert await source("workers").addresses() == {"a.workers:7001", "b.workers:7002"}
        assert await source("none").addresses() == NOBODY
        assert await source("unknown").addresses() == NOBODY
        with pytest.raises(Unavailable, match=r"looking up _grpc\._tcp\.broken failed"):
            await source("broken").addresses()


async def test_the_system_resolver_is_asked_where_none_is_given() -> None:
    assert isinstance(lookup("_grpc._tcp.workers"), SrvLookup)


async def test_workers_that_are_found_by_name_come_and_go(monkeypatch: pytest.MonkeyPatch) -> None:
    """DNS flaps: nobody for a moment changes nothing, nobody for longer than the grace does."""
    there: list[str] = ["10.0.0.1"]
    clock, polled = FakeClock(), asyncio.Event()

    async def getaddrinfo(host: str, port: int, **_: int) -> list[tuple[object, ...]]:
        polled.set()
        if not there:
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        return [(0, 1, 6, "", (each, port)) for each in there]

    async def two_looks() -> None:
        for _ in range(2):
            polled.clear()
            await polled.wait()

    monkeypatch.setattr(asyncio.get_running_loop(), "getaddrinfo", getaddrinfo)
    sets: list[frozenset[str]] = []
    found = Polled(lookup("w:7"), poll_s=0.001, grace_s=10, clock=clock)

    async def follow() -> None:
        async for each in found.watch(print):
            sets.append(each)  # noqa: PERF401 - it never ends

    following = asyncio.create_task(follow())
    async with asyncio.timeout(5):
        await two_looks()
        there[:] = ["10.0.0.1", "10.0.0.2"]
        await two_looks()
        there.clear()
        await two_looks()
        clock.advance(9)
        await two_looks()
        assert len(sets) == 2
        clock.advance(2)
        await two_looks()
    following.cancel()
    await asyncio.gather(following, return_exceptions=True)
    assert sets == [{"10.0.0.1:7"}, {"10.0.0.1:7", "10.0.0.2:7"}, NOBODY]
