"""Workers that announce themselves: leases in a real Redis, in the store of a real Ray head, and by beats."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path

import pytest
from ray_head import RayHead
from redis_process import RedisServer

from core.errors import Unavailable
from services.address import free_port
from services.discovery.announcement import Announcement, Register
from services.discovery.beats import FORGET_AFTER_LEASES, Beats, beat
from services.discovery.ray_register import RayRegister
from services.discovery.redis_register import KEY, RedisRegister

NOBODY: frozenset[str] = frozenset()
LEASE_S = 30.0
SHORT_S = 0.2


async def until(condition: Callable[[], Awaitable[bool]], within_s: float = 10.0) -> None:
    async with asyncio.timeout(within_s):
        while not await condition():
            await asyncio.sleep(0.01)


async def finds(register: Register, *addresses: str) -> bool:
    return await register.addresses() == frozenset(addresses)


@pytest.fixture
def redis_server(tmp_path: Path) -> Iterator[RedisServer]:
    server = RedisServer(tmp_path, "--requirepass", "canary", port=free_port("127.0.0.1"))
    server.url = server.url.replace("//", "//:canary@")
    yield server
    server.stop()


@pytest.fixture
def ray_head(tmp_path: Path) -> Iterator[RayHead]:
    head = RayHead(tmp_path / "ray")
    yield head
    head.stop()


@pytest.fixture(params=["redis", "ray"])
async def registers(request: pytest.FixtureRequest) -> AsyncIterator[tuple[Register, Register]]:
    """A worker's and a router's."""
    if request.param == "redis":
        server = request.getfixturevalue("redis_server")
        both: tuple[Register, Register] = (RedisRegister(server.url), RedisRegister(server.url))
    else:
        head = request.getfixturevalue("ray_head")
        both = (RayRegister(head.address), RayRegister(head.address))

        async def answers() -> bool:
            try:
                return await finds(both[0])
            except Unavailable:
                return False

        await until(answers, 30)
    yield both
    for each in both:
        await each.close()


async def test_a_lease_is_taken_renewed_and_given_up(registers: tuple[Register, Register]) -> None:
    worker, router = registers
    assert await finds(router)
    await worker.renew("h:1", LEASE_S)
    await worker.renew("[::1]:2", LEASE_S)
    await worker.renew("h:1", LEASE_S)
    assert await finds(router, "h:1", "[::1]:2")
    for _ in range(2):
        await worker.withdraw("h:1")
    assert await finds(router, "[::1]:2")


async def test_a_lease_that_nobody_renews_ends(registers: tuple[Register, Register]) -> None:
    worker, router = registers
    await worker.renew("dead:1", SHORT_S)
    await worker.renew("lives:1", LEASE_S)
    assert await finds(router, "dead:1", "lives:1")
    await until(lambda: finds(router, "lives:1"))
    await worker.renew("dead:1", LEASE_S)  # it was only late
    assert await finds(router, "dead:1", "lives:1")


async def test_what_does_not_answer_says_so_in_time_and_without_the_password(
    redis_server: RedisServer,
) -> None:
    """Paused; then gone; then back, knowing nobody."""
    register = RedisRegister(redis_server.url)
    await register.renew("h:1", LEASE_S)
    redis_server.pause()
    with pytest.raises(Unavailable, match="no answer within") as caught:
        await register.addresses()
    redis_server.resume()
    assert await finds(register, "h:1")
    redis_server.stop()
    for what in (register.addresses(), register.renew("h:1", LEASE_S), register.withdraw("h:1")):
        with pytest.raises(Unavailable) as caught:
            await what
        assert "canary" not in caught.value.message
    redis_server.start()
    await until(lambda: finds(register))
    await register.close()


async def test_a_wrong_password_is_named_as_the_reason(redis_server: RedisServer) -> None:
    register = RedisRegister(redis_server.url.replace("canary", "wrong"))
    with pytest.raises(Unavailable, match=r"(?i)password|auth") as caught:
        await register.addresses()
    assert "wrong@" not in caught.value.message
    await register.close()


async def test_redis_forgets_whom_no_router_asks_for(redis_server: RedisServer) -> None:
    register = RedisRegister(redis_server.url)
    client = redis_server.client(password="canary")
    await register.renew("dead:1", 0.001)

    async def alone() -> bool:
        await register.renew("lives:1", LEASE_S)
        return client.zrange(KEY, 0, -1) == [b"lives:1"]

    await until(alone)
    client.close()
    await register.close()


async def test_a_ray_head_that_starts_anew_is_found_again(ray_head: RayHead) -> None:
    """1. Announced.  2. The head is killed: Unavailable, in time.  3. It is back, knowing nobody, on the
    same port: both sides go on by themselves."""
    worker, router = RayRegister(ray_head.address), RayRegister(ray_head.address)

    async def announced() -> bool:
        try:
            await worker.renew("h:1", LEASE_S)
            return await finds(router, "h:1")
        except Unavailable:
            return False

    await until(announced, 30)
    ray_head.stop()
    with pytest.raises(Unavailable, match=f"ray://{ray_head.address}/baton"):
        async with asyncio.timeout(10):
            await router.addresses()
    ray_head.start()
    await until(announced, 60)


def test_a_worker_is_there_as_long_as_its_beat_changes() -> None:
    """1. First seen.  2. Unchanged for less than its lease.  3. For as long: gone.  4. It beats again.
    5. Silent for so long that its entry can go.  6. What is no beat goes at once."""
    beats, dead = Beats(), beat(10)
    lives = frozenset({"a:1"})
    assert beats.observe({"a:1": dead}, now=100) == (lives, NOBODY)
    assert beats.observe({"a:1": dead}, now=109) == (lives, NOBODY)
    assert beats.observe({"a:1": dead}, now=110) == (NOBODY, NOBODY)
    again = beat(10)
    assert beats.observe({"a:1": again}, now=120) == (lives, NOBODY)
    assert beats.observe({"a:1": again}, now=129 + 10 * FORGET_AFTER_LEASES) == (NOBODY, lives)
    for odd in (b"", b"x", b"-1 x", b"nan x"):
        assert beats.observe({"a:1": odd}, now=130) == (NOBODY, lives)
    assert beat(10) != beat(10)


class FakeRegister:
    """A register in a dict. Leases do not end by themselves; `broken`: it does not answer."""

    name = "fake"

    def __init__(self) -> None:
        self.leases: dict[str, float] = {}
        self.renewals = 0
        self.broken = self.closed = False
        self.asked = asyncio.Event()

    async def addresses(self) -> frozenset[str]:
        return frozenset(self.leases)

    async def renew(self, address: str, lease_s: float) -> None:
        self.asked.set()
        self._answer()
        self.renewals += 1
        self.leases[address] = lease_s

    async def withdraw(self, address: str) -> None:
        self._answer()
        self.leases.pop(address, None)

    async def close(self) -> None:
        self.closed = True

    def _answer(self) -> None:
        if self.broken:
            raise Unavailable("the line is cut")


async def test_an_announcement_renews_survives_faults_and_is_withdrawn(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("services.discovery.announcement.RETRY_S", 0.001)
    register, failures = FakeRegister(), []
    announcement = Announcement(register, "h:1", lease_s=0.003)
    await announcement.withdraw()  # one that never began
    announcement.start(lambda: failures.append(1))

    async def renewed() -> bool:
        return register.renewals >= 3

    await until(renewed)
    register.broken = True

    async def failed() -> bool:
        return len(failures) >= 3

    await until(failed)
    register.broken, register.renewals = False, 0
    await until(renewed)
    assert register.leases == {"h:1": 0.003}
    await announcement.withdraw()
    assert (register.leases, register.closed) == ({}, True)
    count = register.renewals
    await announcement.withdraw()
    assert register.renewals == count


async def test_withdrawing_from_what_is_broken_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    register = FakeRegister()
    register.broken = True
    announcement = Announcement(register, "h:1", LEASE_S)
    announcement.start(lambda: None)
    await register.asked.wait()
    async with asyncio.timeout(5):
        await announcement.withdraw()
    assert register.closed
