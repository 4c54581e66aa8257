"""Decode workers die, hang or leave in mid-answer; the answers are those of an undisturbed run, token for token.

Every step is slowed down, so that a fault lands between two tokens. Two decode workers serve; one of them is
stopped until the router has given everything to the other, which then meets the fault.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import httpx
import pytest
from cluster import Cluster, Process, fresh_salt, is_gold, matches_gold, prompt, wait_until

SILENCE_S = 2.0
STEP_S = 0.04

STYLES: dict[str, dict[str, Any]] = {
    "greedy": {},
    "seeded": {"temperature": 0.9, "seed": 5, "top_p": 0.95},
    "two": {"temperature": 1.0, "seed": 11, "n": 2},
    "two-greedy": {"n": 2, "repetition_penalty": 1.2, "frequency_penalty": 0.4},
    "stop": {"stop": ["zebra", "the"], "min_tokens": 30, "temperature": 0.8, "seed": 3},
    "logprobs": {"logprobs": 3},
    "regex": {"structured_outputs": {"regex": "[a-z]+( [a-z]+){45}"}, "temperature": 1.0, "seed": 2},
    "biased": {"logit_bias": {"260": -100}, "bad_words": ["and"], "presence_penalty": 0.5},
}


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with Cluster(
        prefill=0,
        decode=2,
        step_timeout_s=SILENCE_S,
        resume_timeout_s=60,
        max_num_batched_tokens=64,
        decode_flags={"faults": f"engine.step=delay:{STEP_S}"},
    ) as cluster:
        yield cluster


def state(cluster: Cluster, worker: Process) -> str:
    return next((w["state"] for w in cluster.cluster() if w["pid"] == worker.pid), "")


@pytest.fixture
def workers(cluster: Cluster) -> list[Process]:
    """The one that gets what is sent now, and one that is ready a moment after `let_go`."""
    first, second = cluster.ensure("decode-0"), cluster.ensure("decode-1")
    second.kill(signal.SIGSTOP)
    wait_until(lambda: state(cluster, second) == "silent", SILENCE_S + 3)
    return [first, second]


def let_go(cluster: Cluster, worker: Process) -> None:
    worker.kill(signal.SIGCONT)
    wait_until(lambda: state(cluster, worker) == "ready", 5)


def answer_of(cluster: Cluster, name: str, **more: Any) -> dict[int, dict[str, Any]]:
    """A streamed answer put together: by choice its text, tokens, finish and log probabilities; usage as -1."""
    got: dict[int, dict[str, Any]] = {}
    with cluster.stream(prompt(name), stream_options={"include_usage": True}, **more) as events:
        for event in events:
            assert "error" not in event, event
            if event.get("usage"):
                got[-1] = {key: event["usage"][key] for key in ("prompt_tokens", "completion_tokens")}
            for choice in event.get("choices", ()):
                so_far = got.setdefault(
                    choice["index"], {"text": "", "ids": [], "logprobs": [], "finish": None}
                )
                so_far["text"] += choice["text"]
                so_far["ids"] += choice.get("token_ids") or []
                so_far["logprobs"] += (choice.get("logprobs") or {}).get("token_logprobs") or []
                so_far["finish"] = choice["finish_reason"] or so_far["finish"]
    return got


def ask_all(cluster: Cluster, background: ThreadPoolExecutor) -> dict[str, Future[Any]]:
    asked: dict[str, Future[Any]] = {
        style: background.submit(answer_of, cluster, "story-33", **more) for style, more in STYLES.items()
    }
    asked["whole"] = background.submit(cluster.complete, prompt("story-65"), n=2)
    return asked


def generating(worker: Process, count: int) -> bool:
    return worker.stats().get("running", 0) >= count


@pytest.fixture(scope="module")
def undisturbed(cluster: Cluster) -> dict[str, Any]:
    with ThreadPoolExecutor(32) as pool:
        answers = {style: future.result() for style, future in ask_all(cluster, pool).items()}
    assert matches_gold("story-33", answers["greedy"][0]["ids"])
    assert answers["stop"][0]["finish"] == "stop"
    assert {len(answers[style][0]["ids"]) for style in ("seeded", "two", "regex", "biased")} == {48}
    return answers


def resumes(cluster: Cluster, reason: str) -> float:
    return cluster.router.metric("baton_resumes_total", reason=reason)


def assert_equal(answers: dict[str, Future[Any]], undisturbed: dict[str, Any], within_s: float) -> None:
    deadline = time.monotonic() + within_s
    for style, future in answers.items():
        got, expected = future.result(max(0.0, deadline - time.monotonic())), undisturbed[style]
        if isinstance(got, httpx.Response):
            assert got.status_code == 200, got.text
            got, expected = got.json(), expected.json()
            assert got["choices"] == expected["choices"]
            assert got["usage"]["completion_tokens"] == expected["usage"]["completion_tokens"]
        else:
            assert got == expected, style


def test_killed_in_mid_answer(
    cluster: Cluster, undisturbed: dict[str, Any], workers: list[Process], background: ThreadPoolExecutor
):
    """1. Answers of every kind run on one worker. 2. It is killed. 3. All go on at the other: the same tokens,
    texts, log probabilities and counts. 4. The dead one is started again and used."""
    first, second = workers
    before = resumes(cluster, "worker_died")
    asked = ask_all(cluster, background)
    steps = first.stats()["steps"]
    wait_until(lambda: generating(first, 11) and first.stats()["steps"] > steps + 12, 20)
    let_go(cluster, second)
    assert generating(first, 11)
    first.kill()
    assert_equal(asked, undisturbed, 30)
    assert resumes(cluster, "worker_died") == before + len(asked)
    cluster.wait_idle(only=[second.name])


def test_stopped_in_mid_answer(
    cluster: Cluster, undisturbed: dict[str, Any], workers: list[Process], background: ThreadPoolExecutor
):
    """1. Answers run on a worker that is stopped. 2. They go on at the other. 3. The stopped one moves again: what
    it still says reaches nobody, and it lets go of everything."""
    first, second = workers
    before = resumes(cluster, "worker_silent")
    asked = ask_all(cluster, background)
    wait_until(lambda: generating(first, 11), 20)
    let_go(cluster, second)
    first.kill(signal.SIGSTOP)
    try:
        wait_until(lambda: resumes(cluster, "worker_silent") == before + len(asked), SILENCE_S + 3)
    finally:
        first.kill(signal.SIGCONT)
    assert_equal(asked, undisturbed, 30)
    cluster.wait_idle()


@pytest.mark.slow
def test_a_worker_that_leaves_hands_over_what_it_cannot_finish(
    cluster: Cluster, undisturbed: dict[str, Any], background: ThreadPoolExecutor
):
    """1. A worker gets SIGTERM and has no time to finish. 2. Its answers go on at the other; it exits with 0."""
    first, second = cluster.ensure("decode-0", drain_timeout_s=0.2), cluster.ensure("decode-1")
    before = resumes(cluster, "worker_left")
    second.kill(signal.SIGSTOP)
    wait_until(lambda: state(cluster, second) == "silent", SILENCE_S + 3)
    asked = {"greedy": background.submit(answer_of, cluster, "story-33", **STYLES["greedy"])}
    wait_until(lambda: generating(first, 1), 20)
    let_go(cluster, second)
    first.ask_to_stop()
    assert_equal(asked, undisturbed, 20)
    assert first.wait_end(5) == 0
    assert resumes(cluster, "worker_left") == before + 1


@pytest.mark.slow
def test_the_only_worker_is_killed_and_started_again(
    cluster: Cluster, undisturbed: dict[str, Any], background: ThreadPoolExecutor
):
    """As `baton serve` does it: the client waits for the new process, and then gets the rest."""
    first = cluster.ensure("decode-0")
    cluster.worker("decode-1").stop()
    asked = {
        style: background.submit(answer_of, cluster, "story-33", **STYLES[style]) for style in ("two", "stop")
    }
    wait_until(lambda: generating(first, 3), 20)
    first.kill()
    first.start()
    assert_equal(asked, undisturbed, 40)
    cluster.wait_ready([first])


def test_the_router_is_killed(cluster: Cluster, background: ThreadPoolExecutor):
    """1. The router dies with answers under way. 2. The workers end them at once. 3. A new router finds them."""
    first, second = cluster.ensure("decode-0"), cluster.ensure("decode-1")
    asked = [background.submit(cluster.complete, prompt("story-33"), n=2, max_tokens=300) for _ in range(4)]
    wait_until(lambda: generating(first, 1) and generating(second, 1), 20)
    cluster.router.kill()
    cluster.wait_idle(3.0)
    for each in asked:
        with pytest.raises(httpx.TransportError):
            each.result(5)
    cluster.router.start()
    cluster.wait_ready()
    reply = cluster.complete(prompt("story-17"), max_tokens=8)
    assert matches_gold("story-17", reply.json()["choices"][0]["token_ids"], 8)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("victim", "fault"), [("d", signal.SIGKILL), ("p", signal.SIGKILL), ("p", signal.SIGSTOP)]
)
def test_a_fault_in_the_handoff(victim: str, fault: signal.Signals, background: ThreadPoolExecutor):
    """1. P makes a long prompt's blocks, D reads those that are there. 2. One of them is killed, or stopped. 3. The
    other D begins again, with what P has; without P, D computes the rest. The answer is GOLD, and soon."""
    slow_reads = {"faults": "transfer.read=delay:0.3"}
    with Cluster(
        decode=2, transport="shm", max_num_batched_tokens=64, lease_s=2.0, decode_flags=slow_reads
    ) as cluster:
        p, workers = cluster.worker("prefill-0"), cluster.workers[1:]
        salt = {"cache_salt": fresh_salt(), "max_tokens": 8}
        reply = background.submit(cluster.complete, prompt("story-500"), plan="disaggregated", **salt)
        wait_until(lambda: any(d.stats().get("loading") for d in workers) and p.stats()["steps"] > 3, 20)
        d = next(d for d in workers if d.stats().get("loading"))
        met = d if victim == "d" else p
        met.kill(fault)
        try:
            assert is_gold(reply.result(20), "story-500", 8)
        finally:
            if fault == signal.SIGSTOP:
                met.kill(signal.SIGCONT)
        cluster.wait_idle(5, only=[w.name for w in cluster.workers if w is not met])
