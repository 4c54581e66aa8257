"""The `cpu` overlay's Deployments, run: each pod's process with its command line, environment, volumes, user and
read-only root, watched by its own probes, ended by its own preStop and grace period (`deploy_node`).

What differs from a cluster: one compute thread and small pools for each worker, since they share a small machine.
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import httpx
import pytest
from cluster import events, prompt, wait_until
from deploy_node import SECRETS, Node, can_sandbox

from deploy.check.render import documents

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.skipif(
        not can_sandbox(), reason="only root may make pods' roots: mount namespaces, overlayfs"
    ),
]

MODEL = "SmolLM2-135M-Instruct"
NAMES = ["story-17", "story-33", "story-65", "story-128", "story-255"]
KEY = {"Authorization": f"Bearer {SECRETS['baton', 'api-key']}"}


@pytest.fixture(scope="module")
def node(rendered: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Node]:
    objects = documents(rendered["cpu"])
    for each in objects:
        if each["kind"] == "Deployment":
            each["spec"]["template"]["spec"]["containers"][0]["resources"]["limits"]["cpu"] = "1"
        if each["kind"] == "ConfigMap":
            each["data"]["baton.toml"] = each["data"]["baton.toml"].replace("1GiB", "128MiB")
    with Node(objects, tmp_path_factory.mktemp("node")) as node:
        node.wait_ready(node.start("redis"))
        node.wait_ready(node.start("prefill"))
        for started in [
            node.start("decode"),
            node.start("decode"),
            node.start("router"),
            node.start("router"),
        ]:
            node.wait_ready(started)
        settled(node)
        yield node


def settled(node: Node) -> None:
    """Every router knows every worker."""
    expected = {each.name for role in ("prefill", "decode") for each in node.of_role(role)}

    def known() -> bool:
        for router in node.of_role("router"):
            listed = httpx.get(f"{router.url('http')}/v1/cluster", headers=KEY, timeout=5).json()["workers"]
            if {each["id"] for each in listed if each["state"] == "ready"} != expected:
                return False
        return True

    wait_until(known, 60)


class Stream:
    """One streamed completion by a router that is ready now; AssertionError from `ids` unless it ends as it should."""

    def __init__(self, node: Node, name: str, max_tokens: int, plan: str = "auto", salt: str = "") -> None:
        routers = [each for each in node.of_role("router") if each.ready]
        self.router, self.begun = routers[threading.get_ident() % len(routers)], threading.Event()
        self.name, self._max_tokens = name, max_tokens
        self._headers = KEY | {"X-Baton-Plan": plan}
        self.answer: httpx.Headers = httpx.Headers()
        self._salt = {"cache_salt": salt} if salt else {}

    def ids(self) -> list[int]:
        body: dict[str, Any] = {"model": MODEL, "prompt": prompt(self.name), "max_tokens": self._max_tokens}
        body |= {"stream": True, "temperature": 0, "ignore_eos": True, "return_token_ids": True} | self._salt
        url, found = f"{self.router.url('http')}/v1/completions", []
        with httpx.stream("POST", url, json=body, headers=self._headers, timeout=120) as reply:
            assert reply.status_code == 200, reply.read()
            self.answer = reply.headers
            for event in events(reply.iter_lines()):
                if event.get("done"):
                    assert len(found) == self._max_tokens
                    return found
                assert "error" not in event, event
                found += event["choices"][0].get("token_ids", [])
                self.begun.set()
        raise AssertionError("the stream ended without [DONE]")


@pytest.fixture(scope="module")
def right(node: Node) -> dict[str, list[int]]:
    """The answers while nothing happens; long ones."""
    return {name: Stream(node, name, 200).ids() for name in NAMES}


@contextmanager
def open_streams(node: Node, max_tokens: int = 200) -> Iterator[list[tuple[Stream, Future[list[int]]]]]:
    """All of NAMES, each with a token out."""
    with ThreadPoolExecutor(len(NAMES)) as pool:
        streams = [Stream(node, name, max_tokens) for name in NAMES]
        reading = [(stream, pool.submit(stream.ids)) for stream in streams]
        for stream, future in reading:
            wait_until(lambda stream=stream, future=future: stream.begun.is_set() or future.done(), 60)
        yield reading


class Load:
    """Streams one after the other in some threads, until `stop`."""

    def __init__(self, node: Node, right: dict[str, list[int]], threads: int = 2, tokens: int = 16) -> None:
        self.answered, self.failures = 0, []
        self._node, self._right, self._tokens = node, right, tokens
        self._stopping = threading.Event()
        self._threads = [threading.Thread(target=self._run, args=(i,)) for i in range(threads)]
        for thread in self._threads:
            thread.start()

    def _run(self, number: int) -> None:
        while not self._stopping.is_set():
            number += 1
            name = NAMES[number % len(NAMES)]
            try:
                ids = Stream(self._node, name, self._tokens, salt=str(number)).ids()
                assert ids == self._right[name][: self._tokens], f"{name}: other tokens than before"
                self.answered += 1
            except Exception as error:
                self.failures.append(repr(error))

    def stop(self) -> None:
        self._stopping.set()
        for thread in self._threads:
            thread.join(120)


@contextmanager
def load(node: Node, right: dict[str, list[int]]) -> Iterator[Load]:
    running = Load(node, right)
    try:
        yield running
    finally:
        running.stop()


def test_probes_as_written_let_pods_start_and_take_work(node: Node, right: dict[str, list[int]]):
    """A startup probe holds the others back; a disaggregated request passes through P, its KV over to D."""
    for each in node.running:
        assert each.probes["startupProbe"][-1]
        assert all(each.probes["livenessProbe"])
    stream = Stream(node, "story-255", 16, plan="disaggregated", salt="cold")
    assert stream.ids() == right["story-255"][:16]
    assert stream.answer["x-baton-prefill"].startswith("baton-prefill-")
    assert stream.answer["x-baton-decode"].startswith("baton-decode-")


def test_nothing_is_written_outside_the_volumes(node: Node):
    """The root was mounted read-only, so whoever tried has failed and said so."""
    for each in node.running:
        log = each.log.read_text()
        assert "Read-only file system" not in log
        assert "Permission denied" not in log


def test_a_decode_worker_goes_and_cuts_no_stream(node: Node, right: dict[str, list[int]]):
    """1. Streams run on both.  2. One is deleted: preStop, SIGTERM.  3. All streams end as they should.
    4. It exits with 0 within its grace period."""
    gone = node.of_role("decode")[0]
    with open_streams(node) as streams:
        assert node.delete(gone) == 0
        assert all(future.result(120) == right[stream.name] for stream, future in streams)
    assert "worker.cut" not in gone.log.read_text()
    node.wait_ready(node.start("decode"))
    settled(node)


def test_a_router_goes_and_cuts_no_stream(node: Node, right: dict[str, list[int]]):
    """1. Streams run over both routers.  2. One is deleted.  3. Its streams end as they should, new ones are taken by
    the other.  4. It exits with 0."""
    with ThreadPoolExecutor(1) as pool, open_streams(node) as streams:
        gone = streams[0][0].router
        deleting = pool.submit(node.delete, gone)
        wait_until(lambda: gone.terminating, 5)
        later = Stream(node, "story-17", 8)
        assert later.router is not gone
        assert later.ids() == right["story-17"][:8]
        assert all(future.result(120) == right[stream.name] for stream, future in streams)
        assert deleting.result(120) == 0
    node.wait_ready(node.start("router"))
    settled(node)


@pytest.mark.parametrize("role", ["prefill", "decode", "router"])
def test_a_rolling_replacement_fails_no_request(node: Node, right: dict[str, list[int]], role: str):
    before = {each.name for each in node.of_role(role)}
    with load(node, right) as running:
        wait_until(lambda: running.answered > 1, 60)
        node.roll(role)
        settled(node)
        after = running.answered
        wait_until(lambda: running.answered > after or bool(running.failures), 60)
    assert running.failures == []
    assert not before & {each.name for each in node.of_role(role)}
    print(f"{role}: {running.answered} requests while {len(before)} pods were replaced")


def test_a_roll_out_of_another_fingerprint_pairs_nobody_wrongly(node: Node, right: dict[str, list[int]]):
    """1. Another block size is applied, and rolls prefill workers first.  2. While P and D differ, what was to be
    disaggregated is computed by D alone.  3. When both have it they pair again.  4. No request fails."""
    before = copy.deepcopy(node.objects)
    with load(node, right) as running:
        config = next(each for each in node.objects if each["kind"] == "ConfigMap")["data"]
        config["baton.toml"] += "block_size = 32\n"
        node.roll("prefill")
        wait_until(lambda: len(seen(node)) == 2, 60)
        mixed = Stream(node, "story-255", 8, salt="mixed")
        assert mixed.ids() == right["story-255"][:8]
        assert mixed.answer["x-baton-prefill"] == "none"
        node.roll("decode")
        settled(node)
        assert seen(node) == {32}
        paired = Stream(node, "story-255", 8, plan="disaggregated", salt="paired")
        assert paired.ids() == right["story-255"][:8]
        assert paired.answer["x-baton-prefill"].startswith("baton-prefill-")
    node.objects = before
    assert running.failures == []


def seen(node: Node) -> set[int]:
    """Block sizes of the workers that a router follows, those that it does not use among them."""
    router = node.of_role("router")[0]
    listed = httpx.get(f"{router.url('http')}/v1/cluster", headers=KEY, timeout=5).json()["workers"]
    here = (each for each in listed if each["state"] in ("ready", "incompatible"))
    return {each["fingerprint"]["block_size"] for each in here}
