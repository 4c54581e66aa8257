"""Many requests of every kind on a worker that fails; a request under which one worker after another dies."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest
from answers import Answer, ask
from cells import Fault, Style
from cluster import Process, matches_gold, wait_until
from fault_cluster import FaultCluster

pytestmark = pytest.mark.slow

PROMPT = "story-33"
TOKENS = 24
ALONE, TWO = Style(stream=True, n=1), Style(stream=True, n=2)

KINDS: dict[str, tuple[Style, dict[str, Any]]] = {
    "greedy": (ALONE, {}),
    "two-greedy": (TWO, {"repetition_penalty": 1.2, "frequency_penalty": 0.4, "presence_penalty": 0.3}),
    "seeded": (ALONE, {"temperature": 0.9, "seed": 5, "top_p": 0.95}),
    "two-seeded": (TWO, {"temperature": 1.0, "seed": 11, "top_k": 50}),
    "stop": (ALONE, {"temperature": 0.8, "seed": 3, "stop": ["the", "a"], "min_tokens": 16}),
    "logprobs": (ALONE, {"logprobs": 3}),
    "seeded-logprobs": (TWO, {"temperature": 1.1, "seed": 8, "logprobs": 2, "repetition_penalty": 1.1}),
    "everything": (
        Style(stream=False, n=2),
        {"temperature": 0.7, "seed": 2, "logprobs": 1, "frequency_penalty": 0.6, "stop": [". The"]},
    ),
}
"""Eight requests, twelve sequences."""

Asked = dict[str, Future[Answer]]


def ask_all(cluster: FaultCluster, background: ThreadPoolExecutor) -> Asked:
    return {
        kind: background.submit(ask, cluster, PROMPT, style, "local", max_tokens=TOKENS, **more)
        for kind, (style, more) in KINDS.items()
    }


@pytest.fixture(scope="module")
def undisturbed(fleet: FaultCluster) -> dict[str, Answer]:
    with ThreadPoolExecutor(len(KINDS)) as pool:
        answers = {kind: future.result(60) for kind, future in ask_all(fleet, pool).items()}
    assert matches_gold(PROMPT, answers["greedy"].ids[0], TOKENS)
    assert all(answer.done for answer in answers.values())
    assert answers["stop"].finish == {0: "stop"}
    assert len(answers["logprobs"].logprobs[0]) == TOKENS
    return answers


def all_on_one(cluster: FaultCluster, background: ThreadPoolExecutor) -> tuple[Process, Asked]:
    """A worker that has all of them in mid-answer and stands still, beside another one that is ready."""
    first, second = cluster.decoders
    cluster.proxies[second.name].cut()
    wait_until(lambda: cluster.states()[second.name] == "lost", 5)
    cluster.close_gate("decode.start", [first])
    asked = ask_all(cluster, background)
    wait_until(lambda: cluster.router.metric("baton_requests_in_flight") == len(asked), 10)
    cluster.proxies[second.name].heal()
    wait_until(lambda: cluster.states()[second.name] == "ready", 10)
    cluster.close_gate("engine.step", [first], TOKENS // 2)
    cluster.open_gates("decode.start")
    assert cluster.wait_held("engine.step") == [first]
    return first, asked


@pytest.mark.parametrize("fault", [Fault.KILL, Fault.STOP, Fault.CUT, Fault.SILENCE])
def test_eight_requests_at_once(
    cluster: FaultCluster, undisturbed: dict[str, Answer], background: ThreadPoolExecutor, fault: Fault
):
    """1. Eight requests are in mid-answer on one worker.  2. It fails.  3. All go on at the other: the same
    tokens, texts, log probabilities, ends and counts.  4. Each was counted as resumed, once."""
    before = cluster.num_resumes()
    victim, asked = all_on_one(cluster, background)
    strike: dict[Fault, Callable[[], None]] = {
        Fault.KILL: victim.kill,
        Fault.STOP: lambda: cluster.stop_process(victim),
        Fault.CUT: cluster.proxies[victim.name].cut,
        Fault.SILENCE: cluster.proxies[victim.name].silence,
    }
    strike[fault]()
    cluster.open_gates()
    answers = {kind: future.result(40) for kind, future in asked.items()}
    for kind, answer in answers.items():
        assert answer.content == undisturbed[kind].content, kind
        record = cluster.record(answer.request_id)
        assert [each["lost_worker"] for each in record["resumes"]] == [victim.name]
        assert record["completion_tokens"] == answer.usage["completion_tokens"]
    assert cluster.num_resumes() - before == len(asked)
    cluster.assert_at_rest([worker for worker in cluster.workers if worker is not victim])


def test_a_request_that_ends_two_workers_is_refused(cluster: FaultCluster, background: ThreadPoolExecutor):
    """1. A worker dies with a request.  2. It goes on at the other one, which dies too.  3. It does not wait
    for a third: its client is told so at once.  4. Once they are there again, the fleet serves."""
    poisoned = cluster.router.metric("baton_poisoned_total")
    cluster.close_gate("engine.step", cluster.decoders, 2)
    asked = background.submit(ask, cluster, PROMPT, ALONE, "local", "poison", max_tokens=TOKENS)
    (first,) = cluster.wait_held("engine.step")
    (second,) = [worker for worker in cluster.decoders if worker is not first]
    first.kill()
    wait_until(lambda: second.name in [each.name for each in cluster.held_at("engine.step")], 10)
    second.kill()
    answer = asked.result(5)
    assert (answer.error, answer.done, answer.finish) == ("request_poisoned", False, {})
    record = cluster.record("poison")
    assert (record["error"], len(record["resumes"])) == ("request_poisoned", 1)
    assert cluster.router.metric("baton_poisoned_total") == poisoned + 1
    assert cluster.router.metric("baton_resumes_denied_total", why="poisoned") >= 1
    cluster.restore()
    served = ask(cluster, PROMPT, ALONE, max_tokens=TOKENS)
    assert served.done
    assert matches_gold(PROMPT, served.ids[0], TOKENS)


def test_one_answer_survives_two_faults(cluster: FaultCluster, background: ThreadPoolExecutor):
    """1. A worker is cut off in mid-answer.  2. It goes on at the other one.  3. The first is back, the other is
    cut off.  4. The answer is GOLD; two resumes are counted and in the record."""
    before = cluster.num_resumes()
    cluster.close_gate("engine.step", cluster.decoders, 5)
    asked = background.submit(ask, cluster, PROMPT, ALONE, "local", "twice", max_tokens=40)
    (first,) = cluster.wait_held("engine.step")
    (second,) = [worker for worker in cluster.decoders if worker is not first]
    cluster.close_gate("engine.step", [second], 20)
    cluster.proxies[first.name].cut()
    cluster.open_gate("engine.step", first)
    wait_until(lambda: cluster.held_at("engine.step") == [second], 10)
    cluster.proxies[first.name].heal()
    wait_until(lambda: cluster.states()[first.name] == "ready", 10)
    cluster.proxies[second.name].cut()
    cluster.open_gates()
    answer = asked.result(20)
    assert answer.done
    assert matches_gold(PROMPT, answer.ids[0], 40)
    assert answer.usage["completion_tokens"] == 40
    ways = [(each["lost_worker"], each["worker"]) for each in cluster.record("twice")["resumes"]]
    assert ways == [(first.name, second.name), (second.name, first.name)]
    assert cluster.num_resumes() - before == 2
