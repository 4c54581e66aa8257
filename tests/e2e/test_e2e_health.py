"""Probes mean something, and workers come and go without cutting anybody off (E1, a first part of E2)."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from cluster import FLAGS, Cluster, Process, is_gold, matches_gold, prompt, wait_until

from services.address import free_port

STEP_TIMEOUT_S = 2.0


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    flags = {"step_timeout_s": STEP_TIMEOUT_S, "num_blocks": 128, "resume_timeout_s": 0.5}
    with Cluster(transport="shm", max_num_batched_tokens=64, **flags) as cluster:
        yield cluster


@pytest.fixture
def d(cluster: Cluster) -> Process:
    return cluster.ensure("decode-0")


@pytest.fixture
def lone_worker() -> Iterator[Process]:
    port, probe_port = free_port("127.0.0.1"), free_port("127.0.0.1")
    place = {"listen": f"127.0.0.1:{port}", "probe_port": probe_port}
    worker = Process("decode-0", "decode", FLAGS | {"num_blocks": 16} | place, port, probe_port)
    worker.start()
    yield worker
    worker.stop()
    worker.log.unlink()


def router_is_ready(cluster: Cluster) -> bool:
    return httpx.get(f"{cluster.url}/ready", timeout=5).status_code == 200


def state(cluster: Cluster, name: str) -> str:
    return next(w["state"] for w in cluster.cluster() if w["id"] == name)


def probe(worker: Process, path: str) -> tuple[int, dict[str, Any]]:
    """(0, {}) while nobody listens."""
    try:
        reply = httpx.get(f"http://127.0.0.1:{worker.probe_port}{path}", timeout=2)
    except httpx.TransportError:
        return 0, {}
    return reply.status_code, reply.json()


def test_while_loading_a_worker_is_alive_and_not_ready(lone_worker: Process):
    wait_until(lambda: probe(lone_worker, "/health")[0] != 0, 20)
    seen: list[tuple[int, str]] = []
    started: set[tuple[int, str]] = set()
    while (200, "ready") not in seen:
        assert probe(lone_worker, "/health") == probe(lone_worker, "/live") == (200, {"status": "alive"})
        status, body = probe(lone_worker, "/ready")
        seen.append((status, body["state"]))
        status, body = probe(lone_worker, "/startup")
        started.add((status, body["status"]))
        assert len(seen) < 3000
    assert set(seen) == {(503, "loading"), (200, "ready")}
    assert started == {(503, "loading"), (200, "started")}


def test_sigterm_while_loading_ends_at_once(lone_worker: Process):
    wait_until(lambda: probe(lone_worker, "/ready")[0] == 503, 20)
    lone_worker.ask_to_stop()
    assert lone_worker.wait_end(1) == 0


@pytest.mark.parametrize("role", ["decode", "prefill", "router"])
def test_sigterm_right_after_exec_ends_at_once(role: str, tmp_path: Path):
    """Before torch is imported, let alone the model loaded."""
    process = Process(role, role, {"discovery": "static://127.0.0.1:9"}, log=tmp_path / "log")
    process.start()
    wait_until(lambda: catches(process.pid, signal.SIGTERM), 10)
    began = time.monotonic()
    process.popen.terminate()
    assert process.wait_end(5) == 0
    assert time.monotonic() - began < 2
    assert process.log.read_text() == ""


def catches(pid: int, number: int) -> bool:
    """Whether the process has a handler for this signal."""
    caught = next(line for line in Path(f"/proc/{pid}/status").read_text().splitlines() if "SigCgt" in line)
    return bool(int(caught.split()[1], 16) >> (number - 1) & 1)


def test_a_stopped_decode_worker_is_no_healthy_one(cluster: Cluster, d: Process):
    """1. A stream runs.  2. D stops moving, its connections stay open.  3. The router says not ready, and
    the stream ends with an error instead of hanging.  4. D moves again: ready, nothing is left over."""
    with cluster.stream(prompt("story-33"), ignore_eos=True, max_tokens=1000) as events:
        next(events)
        d.kill(signal.SIGSTOP)
        try:
            wait_until(lambda: not router_is_ready(cluster), STEP_TIMEOUT_S + 3)
            assert state(cluster, "decode-0") == "silent"
            assert list(events)[-1]["error"]["code"] == "worker_lost"
            reply = cluster.complete(prompt("story-17"), max_tokens=1)
            assert (reply.status_code, reply.json()["error"]["code"]) == (503, "unavailable")
        finally:
            d.kill(signal.SIGCONT)
    wait_until(lambda: router_is_ready(cluster), 3)
    reply = cluster.complete(prompt("story-17"), max_tokens=4)
    assert is_gold(reply, "story-17", 4)


def test_the_router_drops_a_dead_worker(cluster: Cluster, d: Process):
    cluster.worker("prefill-0").kill()
    wait_until(lambda: state(cluster, "prefill-0") == "lost", 2)
    assert router_is_ready(cluster), "decode workers can do without"
    reply = cluster.complete(prompt("story-65"), max_tokens=1)
    assert (reply.headers["x-baton-plan"], reply.headers["x-baton-reason"]) == ("local", "no_prefill_worker")
    d.kill()
    wait_until(lambda: not router_is_ready(cluster), 2)
    assert httpx.get(f"{cluster.url}/health", timeout=5).status_code == 200
    reply = cluster.complete(prompt("story-17"), max_tokens=1)
    assert reply.status_code == 503


def test_sigterm_lets_a_stream_finish(cluster: Cluster, d: Process):
    """1. A stream runs.  2. D gets SIGTERM.  3. It says that it is not ready; new requests are refused.
    4. The stream ends as it should.  5. D exits with 0, soon."""
    with cluster.stream(prompt("story-33"), max_tokens=100) as events:
        ids = list(next(events)["choices"][0].get("token_ids", []))
        d.ask_to_stop()
        wait_until(lambda: state(cluster, "decode-0") == "draining", 1)
        assert probe(d, "/ready")[0] == 503
        assert cluster.complete(prompt("story-17"), max_tokens=1).status_code == 503
        *pieces, done = events
    assert done == {"done": True}
    ids += [i for piece in pieces for i in piece["choices"][0].get("token_ids", [])]
    assert matches_gold("story-33", ids[:48])
    assert pieces[-1]["choices"][0]["finish_reason"] == "length"
    began = time.monotonic()
    assert d.wait_end(5) == 0
    assert time.monotonic() - began < 3
