"""A worker dies, an engine raises, a lease is lost: the answer is GOLD or an error that says so, soon."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import httpx
import openai
import pytest
from cluster import GOLD, Cluster, Process, fresh_salt, is_gold, prompt, wait_until

FAILURES = "baton_kv_transfer_failures_total"
REMOTE = "baton_prompt_tokens_by_source_total"
LEASE_S = 2.0


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    flags = {"max_num_batched_tokens": 64, "lease_s": LEASE_S, "resume_timeout_s": 0.5}
    with Cluster(transport="shm", **flags) as cluster:
        yield cluster


@pytest.fixture
def p(cluster: Cluster) -> Process:
    return cluster.ensure("prefill-0")


@pytest.fixture
def d(cluster: Cluster, p: Process) -> Process:
    return cluster.ensure("decode-0")


def handoff(
    cluster: Cluster, background: ThreadPoolExecutor, name: str, **more: Any
) -> Future[httpx.Response]:
    """Begin a request whose blocks come from the prefill worker; returns when that has made some."""
    p = cluster.worker("prefill-0")
    steps = p.stats()["steps"]
    reply = background.submit(
        cluster.complete, prompt(name), plan="disaggregated", cache_salt=fresh_salt(), **more
    )
    wait_until(lambda: p.stats()["steps"] >= steps + 3 and p.stats()["running"] == 1, 20)
    return reply


class TestThePrefillWorkerDies:
    """C1. D makes the missing blocks itself; the client notices only time."""

    def test_before_the_handoff(self, cluster: Cluster, d: Process, p: Process):
        """1. P is killed.  2. At once a request comes; the router may or may not know already.
        3. The answer is GOLD.  4. P comes back on its address.  5. It is used again."""
        failures = d.metric(FAILURES, reason="peer_lost")
        cluster.complete(prompt("story-65"), plan="disaggregated", max_tokens=1)  # they know each other
        p.kill()
        reply = cluster.complete(prompt("story-65"), cache_salt=fresh_salt(), max_tokens=12)
        assert is_gold(reply, "story-65", 12)
        planned = reply.headers["x-baton-plan"] == "disaggregated"
        assert d.metric(FAILURES, reason="peer_lost") == failures + planned
        assert planned or reply.headers["x-baton-reason"] == "no_prefill_worker"
        cluster.wait_idle(only=["decode-0"])
        self._comes_back(cluster, d)

    @pytest.mark.slow
    def test_after_the_plan_was_made(self, cluster: Cluster, p: Process, background: ThreadPoolExecutor):
        """1. The router plans with P; D is a second late in taking the request up.  2. P is killed meanwhile.
        3. D finds nobody, which is a failed source; the answer is GOLD, and soon."""
        d = cluster.ensure("decode-0", faults="decode.start=delay:1")
        began = time.monotonic()
        reply = background.submit(cluster.complete, prompt("story-65"), plan="disaggregated", max_tokens=4)
        time.sleep(0.5)
        p.kill()
        assert is_gold(reply.result(), "story-65", 4)
        assert time.monotonic() - began < 5
        assert d.metric(FAILURES, reason="peer_lost") == 1

    @pytest.mark.parametrize("name", ["story-1000", pytest.param("story-2048", marks=pytest.mark.slow)])
    def test_during_the_handoff(
        self, cluster: Cluster, d: Process, p: Process, background: ThreadPoolExecutor, name: str
    ):
        """1. D pulls a long prompt's blocks while P makes them.  2. P is killed.  3. The answer is GOLD:
        D keeps the blocks it has and computes the rest.  4. P comes back and is used again."""
        failures = d.metric(FAILURES, reason="peer_lost")
        remote = d.metric(REMOTE, source="prefill_worker")
        reply = handoff(cluster, background, name, max_tokens=16)
        p.kill()
        assert is_gold(reply.result(), name, 16)
        assert d.metric(FAILURES, reason="peer_lost") == failures + 1
        moved = d.metric(REMOTE, source="prefill_worker") - remote
        assert 0 < moved < len(prompt(name)) - 16, "the blocks that came before P died are kept"
        cluster.wait_idle(only=["decode-0"])
        self._comes_back(cluster, d)

    @staticmethod
    def _comes_back(cluster: Cluster, d: Process) -> None:
        cluster.restart("prefill-0")
        remote = d.metric(REMOTE, source="prefill_worker")
        reply = cluster.complete(
            prompt("story-65"), plan="disaggregated", cache_salt=fresh_salt(), max_tokens=4
        )
        assert is_gold(reply, "story-65", 4)
        assert d.metric(REMOTE, source="prefill_worker") == remote + 64

    def test_stops_without_dying(
        self, cluster: Cluster, d: Process, p: Process, background: ThreadPoolExecutor
    ):
        """1. P stops in mid-handoff, its connections stay open.  2. The lease cannot be renewed: D goes
        on alone.  3. P wakes up and drops what it held."""
        reply = handoff(cluster, background, "story-500", max_tokens=8)
        p.kill(signal.SIGSTOP)
        try:
            assert is_gold(reply.result(10 + LEASE_S), "story-500", 8)
            cluster.wait_idle(only=["decode-0"])
        finally:
            p.kill(signal.SIGCONT)


class TestTheDecodeWorkerDies:
    """A6 and C1, the other way round."""

    def test_during_the_handoff(self, cluster: Cluster, d: Process, background: ThreadPoolExecutor):
        """1. P makes a long prompt's blocks.  2. D is killed.  3. Nothing was sent yet: the client gets
        a real status, within 2 s.  4. P is free within 2 s."""
        reply = handoff(cluster, background, "story-1000", stream=True)
        d.kill()
        died = time.monotonic()
        answer = reply.result(2)
        assert answer.status_code == 503
        assert answer.json()["error"]["code"] == "worker_lost"
        cluster.wait_idle(died + 2 - time.monotonic(), only=["prefill-0"])

    def test_in_mid_stream(self, cluster: Cluster, d: Process):
        """1. Two streams run, one read by hand, one by the official client.  2. D is killed.  3. Within
        2 s the first ends with an error event, without [DONE]; the second raises."""
        client = openai.OpenAI(base_url=f"{cluster.url}/v1", api_key="none", max_retries=0)
        ask: dict[str, Any] = {"max_tokens": 1000, "temperature": 0}
        with cluster.stream(prompt("story-33"), ignore_eos=True, **ask) as events:
            official = client.completions.create(
                model=cluster.model, prompt=prompt("story-17"), stream=True,
                extra_body={"ignore_eos": True}, **ask,
            )  # fmt: skip
            next(events)
            next(iter(official))
            d.kill()
            died = time.monotonic()
            last = list(events)[-1]
            assert last["error"]["code"] == "worker_lost"
            with pytest.raises(openai.APIError):
                list(official)
            assert time.monotonic() - died < 2


class TestAStepFails:
    """A6. The requests of a broken step fail, each in its way; the engine goes on."""

    def test_the_first(self, cluster: Cluster, p: Process):
        cluster.restart("decode-0", faults="engine.step@1=raise")
        reply = cluster.complete(prompt("story-33"), plan="local", stream=True)
        assert reply.status_code == 500
        assert reply.json()["error"]["code"] == "engine_fault"
        assert is_gold(cluster.complete(prompt("story-33"), plan="local", max_tokens=8), "story-33", 8)

    def test_a_later_one(self, cluster: Cluster, p: Process):
        cluster.restart("decode-0", faults="engine.step@4=raise")
        with cluster.stream(prompt("story-33"), plan="local") as events:
            *pieces, last = events
        assert last["error"]["code"] == "engine_fault"
        ids = [i for piece in pieces for i in piece["choices"][0].get("token_ids", [])]
        assert ids
        assert ids == GOLD["story-33"]["output_ids"][: len(ids)]
        assert all(piece["choices"][0]["finish_reason"] is None for piece in pieces)
        assert is_gold(cluster.complete(prompt("story-33"), plan="local", max_tokens=8), "story-33", 8)

    @pytest.mark.slow
    def test_on_the_prefill_worker(self, cluster: Cluster, d: Process):
        """A broken source is a miss: D computes what did not come."""
        cluster.restart("prefill-0", faults="engine.step@2=raise")
        failures = d.metric(FAILURES)
        reply = cluster.complete(
            prompt("story-255"), plan="disaggregated", cache_salt=fresh_salt(), max_tokens=8
        )
        assert is_gold(reply, "story-255", 8)
        assert d.metric(FAILURES) == failures + 1


class TestTheLease:
    """C3. A block is trusted only if it was still ours when the read was over."""

    @pytest.fixture
    def d(self, cluster: Cluster, p: Process) -> Process:
        """Its reads take longer than a lease."""
        return cluster.ensure("decode-0", faults=f"transfer.read=delay:{LEASE_S + 0.5}")

    def test_is_renewed_during_a_slow_read(self, cluster: Cluster, d: Process):
        reply = cluster.complete(
            prompt("story-65"), plan="disaggregated", cache_salt=fresh_salt(), max_tokens=8
        )
        assert is_gold(reply, "story-65", 8)
        assert d.metric(FAILURES) == 0
        assert d.metric(REMOTE, source="prefill_worker") == 64

    def test_lost_during_a_read_is_a_failed_read(
        self, cluster: Cluster, d: Process, p: Process, background: ThreadPoolExecutor
    ):
        """1. D reads slowly.  2. D is stopped for longer than the lease: P gives the blocks to others.
        3. D wakes up, and its read succeeds.  4. It is not believed; the answer is GOLD."""
        remote = d.metric(REMOTE, source="prefill_worker")
        expired = p.metric("baton_kv_leases_expired_total")
        reply = background.submit(
            cluster.complete, prompt("story-65"), plan="disaggregated", cache_salt=fresh_salt(), max_tokens=8
        )
        wait_until(lambda: p.stats()["held"] == 1, 10)
        d.kill(signal.SIGSTOP)
        try:
            cluster.wait_idle(LEASE_S + 2, only=["prefill-0"])
        finally:
            d.kill(signal.SIGCONT)
        assert is_gold(reply.result(), "story-65", 8)
        assert d.metric(FAILURES, reason="lease_lost") == 1
        assert d.metric(REMOTE, source="prefill_worker") == remote
        assert p.metric("baton_kv_leases_expired_total") == expired + 1

    def test_a_leaving_prefill_worker_waits_for_the_read(
        self, cluster: Cluster, d: Process, p: Process, background: ThreadPoolExecutor
    ):
        """E2. 1. D reads slowly.  2. P gets SIGTERM.  3. D gets its blocks.  4. P exits with 0."""
        failures, remote = d.metric(FAILURES), d.metric(REMOTE, source="prefill_worker")
        reply = background.submit(
            cluster.complete, prompt("story-65"), plan="disaggregated", cache_salt=fresh_salt(), max_tokens=8
        )
        wait_until(lambda: p.stats()["held"] == 1, 10)
        p.ask_to_stop()
        assert is_gold(reply.result(), "story-65", 8)
        assert d.metric(FAILURES) == failures
        assert d.metric(REMOTE, source="prefill_worker") == remote + 64
        assert p.wait_end(5) == 0
