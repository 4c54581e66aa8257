"""Processes come, go and change their role, and no client meets an error for it (E1, E2)."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import httpx
import pytest
from cluster import PLAIN, Cluster, Process, fresh_salt, is_gold, matches_gold, prompt, wait_until

GRACE_S = 0.5
NAMES = ["story-17", "story-33", "story-65", "story-128", "story-255"]
STREAMED = 48


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with Cluster(prefill=1, decode=2, transport="shm", max_num_batched_tokens=64) as cluster:
        yield cluster


@pytest.fixture(autouse=True)
def everybody(cluster: Cluster) -> None:
    """All workers in their first roles, and the router."""
    for worker in cluster.workers:
        cluster.ensure(worker.name)
    if not cluster.router.alive:
        cluster.router.start()
        cluster.wait_ready()


def get(process: Process, path: str) -> tuple[int, dict[str, Any]]:
    """(0, {}) while nobody listens."""
    try:
        reply = httpx.get(f"http://127.0.0.1:{process.probe_port}{path}", timeout=2, verify=PLAIN)
    except httpx.TransportError:
        return 0, {}
    return reply.status_code, reply.json()


def state(cluster: Cluster, name: str) -> str:
    return next(w["state"] for w in cluster.cluster() if w["id"] == name)


def decodes_next(cluster: Cluster) -> str:
    return cluster.complete(prompt("story-17"), max_tokens=1).headers["x-baton-decode"]


class Stream:
    """A stream that is read in the background."""

    def __init__(self, cluster: Cluster, background: ThreadPoolExecutor, name: str, **more: Any) -> None:
        self.name, self._begun = name, False
        self._reading: Future[list[int]] = background.submit(self._read, cluster, more)

    def _read(self, cluster: Cluster, more: dict[str, Any]) -> list[int]:
        ids: list[int] = []
        with cluster.stream(prompt(self.name), **{"max_tokens": STREAMED} | more) as events:
            for event in events:
                if event.get("done"):
                    return ids
                assert "error" not in event, event
                ids += event["choices"][0].get("token_ids", [])
                self._begun = True
        raise AssertionError("the stream ended without [DONE]")

    def begun(self) -> bool:
        """Its first token is out."""
        if self._reading.done():
            self._reading.result()
        return self._begun

    def ids(self) -> list[int]:
        return self._reading.result(60)


def five_streams(cluster: Cluster, background: ThreadPoolExecutor, **more: Any) -> list[Stream]:
    """Of prompts that no worker holds, so that all decode workers get some."""
    more |= {"cache_salt": fresh_salt()}
    streams = [Stream(cluster, background, name, **more) for name in NAMES]
    wait_until(lambda: all(stream.begun() for stream in streams), 30)
    return streams


class TestADecodeWorkerLeaves:
    @pytest.mark.parametrize("grace_s", [pytest.param(0, marks=pytest.mark.slow), GRACE_S])
    def test_its_streams_end_well_and_new_ones_go_elsewhere(
        self, cluster: Cluster, background: ThreadPoolExecutor, grace_s: float
    ):
        """1. Five streams run on two decode workers.  2. One of these gets SIGTERM.  3. Requests come that
        the router may send to it, not knowing yet.  4. All get their answers.  5. It exits with 0."""
        d = cluster.ensure("decode-0", shutdown_grace_s=grace_s)
        streams = five_streams(cluster, background)
        d.ask_to_stop()
        new = [background.submit(cluster.complete, prompt("story-33"), max_tokens=4) for _ in range(6)]
        wait_until(lambda: state(cluster, "decode-0") in ("draining", "lost"), 2)
        later = cluster.complete(prompt("story-17"), max_tokens=4)
        assert later.headers["x-baton-decode"] == "decode-1"
        assert is_gold(later, "story-17", 4)
        assert all(is_gold(reply.result(30), "story-33", 4) for reply in new)
        assert all(matches_gold(stream.name, stream.ids(), STREAMED) for stream in streams)
        assert d.wait_end(10) == 0
        assert "worker.cut" not in d.log.read_text()

    def test_what_is_left_at_the_bound_goes_on_elsewhere(
        self, cluster: Cluster, background: ThreadPoolExecutor
    ):
        """1. Streams run.  2. A worker that has no time to drain gets SIGTERM.  3. It exits with 0 and says what
        it cut.  4. Those who read notice nothing."""
        both = [cluster.ensure(name, drain_timeout_s=0) for name in ("decode-0", "decode-1")]
        streams = five_streams(cluster, background)
        d = max(both, key=lambda worker: worker.stats()["running"])
        d.ask_to_stop()
        assert d.wait_end(10) == 0
        assert '"event":"worker.cut"' in d.log.read_text()
        assert all(matches_gold(stream.name, stream.ids(), STREAMED) for stream in streams)

    @pytest.mark.slow
    def test_a_second_signal_ends_it_at_once(self, cluster: Cluster, background: ThreadPoolExecutor):
        d = cluster.worker("decode-0")
        with cluster.stream(prompt("story-33"), ignore_eos=True, max_tokens=1000) as events:
            next(events)
            busy = next(w for w in cluster.workers if w.stats()["running"])
            busy.ask_to_stop()
            wait_until(lambda: get(busy, "/ready")[1].get("state") == "draining", 2)
            busy.popen.terminate()
            assert busy.wait_end(2) == 1
        assert d.alive or busy is d


class TestTheRouterLeaves:
    @pytest.fixture
    def router(self, cluster: Cluster) -> Iterator[Process]:
        """Started with the flags that a test gives."""
        router = cluster.router
        first = router.flags
        yield router
        router.flags = first
        router.stop()

    def restarted(self, cluster: Cluster, **flags: Any) -> Process:
        cluster.router.stop()
        cluster.router.flags = cluster.router.flags | flags
        cluster.router.start()
        cluster.wait_ready()
        return cluster.router

    def test_its_streams_end_well(self, cluster: Cluster, router: Process, background: ThreadPoolExecutor):
        """1. Streams run.  2. The router gets SIGTERM.  3. It says that it is not ready, and still serves, on
        connections that end with the answer.  4. Then it refuses in a sentence, with the time to come again.
        5. The streams end as they should; it exits with 0; nobody listens."""
        self.restarted(cluster, shutdown_grace_s=GRACE_S, drain_timeout_s=100)
        kept = httpx.Client(verify=PLAIN, timeout=20)
        kept.get(f"{cluster.url}/health")
        streams = five_streams(cluster, background, max_tokens=200, ignore_eos=True)
        router.ask_to_stop()
        wait_until(lambda: get(router, "/ready")[0] == 503, 2)
        assert get(router, "/health") == (200, {"status": "draining"})
        assert "the router is shutting down" in get(router, "/ready")[1]["problems"]
        served = cluster.complete(prompt("story-17"), max_tokens=1)
        assert (served.status_code, served.headers["connection"]) == (200, "close")
        wait_until(lambda: cluster.complete(prompt("story-17"), max_tokens=1).status_code == 503, 3)
        refused = kept.post(f"{cluster.url}/v1/completions", json=cluster.body(prompt("story-17")))
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "unavailable")
        assert int(refused.headers["retry-after"]) >= 1
        assert refused.headers["connection"] == "close"
        assert all(len(stream.ids()) == 200 for stream in streams)
        assert router.wait_end(5) == 0
        with pytest.raises(httpx.ConnectError):
            httpx.get(f"{cluster.url}/health", verify=PLAIN)

    @pytest.mark.slow
    def test_what_is_left_at_the_bound_gets_an_error(
        self, cluster: Cluster, router: Process, background: ThreadPoolExecutor
    ):
        """1. A stream and a whole answer are made.  2. SIGTERM; the time to drain is over soon.  3. The stream
        ends with an error event, the other with a status.  4. It exits with 0, and the workers are free."""
        self.restarted(cluster, drain_timeout_s=0.2)
        long = {"max_tokens": 1000, "ignore_eos": True}
        whole = background.submit(cluster.complete, prompt("story-17"), **long)
        with cluster.stream(prompt("story-33"), **long) as events:
            next(events)
            wait_until(lambda: sum(w.stats()["running"] for w in cluster.workers) == 2, 5)
            router.ask_to_stop()
            assert list(events)[-1]["error"]["code"] == "unavailable"
        assert whole.result(5).status_code == 503
        assert "shut down before the answer was complete" in whole.result().json()["error"]["message"]
        assert router.wait_end(5) == 0
        cluster.wait_idle()

    def test_sigint_leaves_out_the_grace_and_a_second_signal_everything(
        self, cluster: Cluster, router: Process
    ):
        self.restarted(cluster, shutdown_grace_s=60)
        with cluster.stream(prompt("story-33"), max_tokens=1000, ignore_eos=True) as events:
            next(events)
            router.kill(signal.SIGINT)
            wait_until(lambda: cluster.complete(prompt("story-17"), max_tokens=1).status_code == 503, 3)
            router.kill(signal.SIGINT)
            assert router.wait_end(2) == 1
        cluster.wait_idle()


class TestARoleChanges:
    def change(self, cluster: Cluster, name: str, role: str) -> httpx.Response:
        url = f"{cluster.admin_url}/v1/cluster/workers/{name}/role"
        return httpx.post(url, json={"role": role}, timeout=10, verify=PLAIN)

    def wait_for(self, cluster: Cluster, name: str, role: str) -> dict[str, Any]:
        def found() -> list[dict[str, Any]]:
            listed = [w for w in cluster.cluster() if w["id"] == name]
            return [w for w in listed if (w["role"], w["state"]) == (role, "ready")]

        wait_until(lambda: bool(found()), 15, lambda: str(cluster.cluster()))
        return found()[0]

    def test_there_and_back_under_traffic(self, cluster: Cluster, background: ThreadPoolExecutor):
        """1. Streams run all the time.  2. The prefill worker is to decode: it says that it drains, then that
        it decodes, in the same life.  3. It decodes.  4. Back again; it builds blocks for others.
        5. All answers are right, and nothing is left over."""
        p = cluster.ensure("prefill-0", shutdown_grace_s=GRACE_S)
        life = next(w["incarnation"] for w in cluster.cluster() if w["id"] == "prefill-0")
        streams = five_streams(cluster, background)
        begun = self.change(cluster, "prefill-0", "decode")
        assert (begun.status_code, begun.json()["state"]) == (202, "draining")
        streams += [Stream(cluster, background, name) for name in NAMES[:2]]
        assert self.wait_for(cluster, "prefill-0", "decode")["incarnation"] == life
        assert get(p, "/ready")[1]["role"] == "decode"
        used = {
            cluster.complete(prompt("story-17"), max_tokens=1).headers["x-baton-decode"] for _ in range(30)
        }
        assert "prefill-0" in used
        assert p.metric("baton_engine_steps_total", role="decode") > 0
        assert self.change(cluster, "prefill-0", "prefill").status_code == 202
        streams += [Stream(cluster, background, name) for name in NAMES[:2]]
        self.wait_for(cluster, "prefill-0", "prefill")
        reply = cluster.complete(prompt("story-65"), plan="disaggregated", cache_salt="role", max_tokens=4)
        assert is_gold(reply, "story-65", 4)
        assert reply.headers["x-baton-prefill"] == "prefill-0"
        assert all(matches_gold(stream.name, stream.ids(), STREAMED) for stream in streams)

    def test_refused_where_it_makes_no_sense(self, cluster: Cluster):
        assert self.change(cluster, "decode-7", "prefill").status_code == 404
        assert self.change(cluster, "decode-0", "both").json()["error"]["param"] == "role"
        same = self.change(cluster, "decode-0", "decode")
        assert (same.status_code, same.json()["state"]) == (200, "ready")
        cluster.worker("prefill-0").kill()
        wait_until(lambda: state(cluster, "prefill-0") == "lost", 2)
        assert self.change(cluster, "prefill-0", "decode").status_code == 503

    def test_refused_for_the_last_decode_worker(self, cluster: Cluster):
        assert self.change(cluster, "decode-0", "prefill").status_code == 202
        last = self.change(cluster, "decode-1", "prefill")
        assert last.status_code == 409
        assert "decode-1 is the last decode worker that is ready" in last.json()["error"]["message"]
        self.wait_for(cluster, "decode-0", "prefill")
        assert self.change(cluster, "decode-0", "decode").status_code == 202
        self.wait_for(cluster, "decode-0", "decode")


def test_probes_of_every_process(cluster: Cluster):
    for process in cluster.processes:
        assert get(process, "/startup")[0] == 200
        assert get(process, "/live") == get(process, "/health") == (200, {"status": "alive"})
        assert get(process, "/ready")[0] == 200
