"""Workers that announce themselves in Redis, and two routers that share nothing but them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from cluster import PLAIN, Cluster, Process, fresh_salt, is_gold, prompt, sum_of, wait_until
from ray_head import RayHead
from redis_process import RedisServer

from services.address import free_port
from services.discovery.redis_register import KEY

pytestmark = pytest.mark.timeout(300)
CANARY = "canary-password"
GOLD = "story-64"
HOST = "127.0.0.1"
LEASE_S = 3


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    server = RedisServer(tmp_path_factory.mktemp("redis"), "--requirepass", CANARY, port=free_port(HOST))
    yield server
    server.stop()


@pytest.fixture(scope="module")
def fleet(server: RedisServer) -> Iterator[Cluster]:
    """Two decode workers and a router that find each other in Redis. No flag has its password."""
    url = server.url.replace("//", f"//:{CANARY}@") + "/0"
    flags: dict[str, object] = {"discovery_poll_s": 0.2, "discovery_lease_s": LEASE_S}
    with Cluster(prefill=0, decode=2, env={"BATON_DISCOVERY": url}, **flags) as fleet:
        yield fleet


@pytest.fixture(scope="module")
def second(fleet: Cluster) -> Iterator[Process]:
    """A router beside the first."""
    port = free_port(HOST)
    flags = fleet.router.flags | {"port": port, "admin_port": free_port(HOST)}
    router = Process("router-2", "router", flags, port, port, fleet.router.env)
    router.start()
    try:
        wait_until(lambda: len(ready(router)) == 2, 60, router.log.read_text)
        yield router
    finally:
        router.stop()
        router.log.unlink()


def seen(router: Process) -> list[dict[str, Any]]:
    reply = httpx.get(f"http://127.0.0.1:{router.port}/v1/cluster", timeout=5, verify=PLAIN)
    return reply.json()["workers"]


def ready(router: Process) -> set[int]:
    """Process ids of the workers that it uses."""
    try:
        return {worker["pid"] for worker in seen(router) if worker["state"] == "ready"}
    except (httpx.HTTPError, KeyError, ValueError):
        return set()


def ask(fleet: Cluster, router: Process, **more: Any) -> httpx.Response:
    url = f"http://127.0.0.1:{router.port}/v1/completions"
    body = fleet.body(prompt(GOLD), cache_salt=fresh_salt(), **more)
    return httpx.post(url, json=body, timeout=60, verify=PLAIN)


def announced(server: RedisServer) -> set[str]:
    client = server.client(password=CANARY)
    try:
        return {each.decode() for each in client.zrange(KEY, 0, -1)}  # type: ignore[union-attr]
    finally:
        client.close()


def test_two_routers_find_the_workers_and_see_each_other_s_load(fleet: Cluster, second: Process) -> None:
    """1. Both routers answer as GOLD does.  2. A long request through either: the other one sees it running.
    3. It ends: the other one sees that too."""
    workers = {worker.pid for worker in fleet.workers}
    assert ready(fleet.router) == ready(second) == workers

    def load(router: Process) -> int:
        return sum(worker["running"] for worker in seen(router))

    first = fleet.router
    for router, other in ((first, second), (second, first)):
        assert is_gold(ask(fleet, router), GOLD)
        body = fleet.body(prompt(GOLD), stream=True, max_tokens=2000, ignore_eos=True)
        url = f"http://127.0.0.1:{router.port}/v1/completions"
        with httpx.stream("POST", url, json=body, timeout=60, verify=PLAIN) as reply:
            lines = reply.iter_lines()  # held on to: without it the connection closes
            next(lines)
            wait_until(lambda other=other: load(other) == 1, 5, lambda other=other: str(seen(other)))
        wait_until(lambda other=other: load(other) == 0, 5)
    fleet.wait_idle(5)


def test_workers_come_die_and_go_while_the_routers_stay(
    fleet: Cluster, second: Process, server: RedisServer
) -> None:
    """1. kill -9 of a worker: both routers know at once.  2. Its lease ends: they forget its address.  3. Redis
    dies: all goes on.  4. It comes back, knowing nobody: the worker that lives is announced again.  5. A new
    worker on another address appears and is used.  6. SIGTERM of the other one: it withdraws, and the routers
    forget it.  7. Nobody wrote the password anywhere."""
    routers = (fleet.router, second)
    victim, survivor = fleet.worker("decode-0"), fleet.worker("decode-1")
    gone, stays = f"127.0.0.1:{victim.port}", f"127.0.0.1:{survivor.port}"
    assert announced(server) == {gone, stays}

    victim.kill()
    for router in routers:
        wait_until(lambda router=router: ready(router) == {survivor.pid}, 5)
        assert is_gold(ask(fleet, router), GOLD)
    for router in routers:
        wait_until(lambda router=router: {w["addresses"]["discovered"] for w in seen(router)} == {stays}, 15)

    server.stop()
    wait_until(
        lambda: faults(fleet.router) > 0 and survivor.metric("baton_announcements_failed_total") > 0, 10
    )
    for router in routers:
        assert ready(router) == {survivor.pid}
        assert is_gold(ask(fleet, router), GOLD)
    server.start()
    wait_until(lambda: announced(server) == {stays}, 10)

    port = free_port(HOST)
    victim.flags = victim.flags | {"listen": f"127.0.0.1:{port}", "worker_id": "decode-new"}
    victim.port = port
    victim.start()
    for router in routers:
        wait_until(lambda router=router: ready(router) == {survivor.pid, victim.pid}, 60)
    assert announced(server) == {stays, f"127.0.0.1:{port}"}

    assert survivor.stop() == 0
    assert announced(server) == {f"127.0.0.1:{port}"}
    for router in routers:
        wait_until(lambda router=router: {w["pid"] for w in seen(router)} == {victim.pid}, 10)
        reply = ask(fleet, router)
        assert is_gold(reply, GOLD)
        assert reply.headers["x-baton-decode"] == "decode-new"
    fleet.workers.remove(survivor)
    fleet.wait_idle(5)

    assert "discovery.failed" in fleet.log_text()
    assert CANARY not in fleet.log_text() + second.log.read_text()
    for process in (*fleet.processes, second):
        assert CANARY not in Path(f"/proc/{process.pid}/cmdline").read_text()


def faults(router: Process) -> float:
    try:
        return sum_of(router.metrics(), "baton_faults_total", where="discovery")
    except AssertionError:  # none of any kind yet
        return 0.0


@pytest.mark.slow
def test_workers_find_each_other_through_the_head_of_a_ray_cluster(tmp_path: Path) -> None:
    """1. Found; a handoff works.  2. The head dies: all goes on, counted, and every process ends in order."""
    head = RayHead(tmp_path)
    flags: dict[str, object] = {"discovery_poll_s": 0.2, "discovery_lease_s": LEASE_S}
    try:
        with Cluster(env={"BATON_DISCOVERY": f"ray://{head.address}"}, **flags) as fleet:
            assert is_gold(fleet.complete(prompt(GOLD), plan="disaggregated"), GOLD)
            head.stop()
            decode = fleet.worker("decode-0")
            wait_until(lambda: decode.metric("baton_announcements_failed_total") > 0, 10)
            wait_until(lambda: faults(fleet.router) > 0, 10)
            assert is_gold(fleet.complete(prompt(GOLD), plan="disaggregated"), GOLD)
            assert [process.stop() for process in fleet.processes] == [0, 0, 0]
    finally:
        head.stop()
