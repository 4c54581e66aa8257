"""Pools that are small, prompts that are long, input that is wrong, many requests at once."""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from cluster import GOLD, Cluster, fresh_salt, is_gold, only_choice, prompt

BLOCK = 16
VOCAB = 49152


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    """A decode worker of 32 blocks (512 tokens), a prefill worker of 256."""
    small = {"num_blocks": 32}
    with Cluster(transport="shm", num_blocks=256, max_num_batched_tokens=64, decode_flags=small) as cluster:
        yield cluster


@pytest.mark.parametrize("plan", ["auto", "local", "disaggregated"])
def test_what_never_fits_is_refused_at_once(cluster: Cluster, plan: str):
    """B5, C8. The prompt fits the model and P's pool, not D's: refused before any worker works."""
    steps = cluster.worker("prefill-0").stats()["steps"]
    began = time.monotonic()
    reply = cluster.complete(prompt("story-1000")[:600], plan=plan)
    assert time.monotonic() - began < 1
    error = reply.json()["error"]
    assert (reply.status_code, error["code"], error["param"]) == (400, "context_length_exceeded", "prompt")
    assert "512" in error["message"]
    assert "600" in error["message"]
    assert cluster.worker("prefill-0").stats()["steps"] == steps


@pytest.mark.parametrize(("num_requests", "share"), [(3, 0.6), (2, 0.7)])
def test_together_too_big_they_finish_in_turn(
    cluster: Cluster, background: ThreadPoolExecutor, num_requests: int, share: float
):
    """B5, C8. Each request grows to this share of D's pool; none waits for ever, none is cut short."""
    answer = 60
    num_prompt = int(32 * BLOCK * share) - answer
    replies = [
        background.submit(
            cluster.complete, prompt("story-500")[i : i + num_prompt], plan=plan,
            max_tokens=answer, ignore_eos=True, cache_salt=fresh_salt(),
        )
        for i, plan in zip(range(num_requests), ("disaggregated", "local", "disaggregated"), strict=False)
    ]  # fmt: skip
    assert [len(only_choice(reply.result())["token_ids"]) for reply in replies] == [answer] * num_requests


def test_preempted_answers_are_the_same_answers(cluster: Cluster, background: ThreadPoolExecutor):
    """1. Four GOLD prompts together outgrow D's pool while they decode.  2. Some are preempted.  3. All
    are GOLD."""
    d = cluster.worker("decode-0")
    before = d.stats()["preemptions"]
    names = ["story-128", "story-129", "story-65", "story-64"]
    replies = {
        name: background.submit(
            cluster.complete, prompt(name), max_tokens=48, ignore_eos=True, cache_salt=fresh_salt()
        )
        for name in names
    }
    for name, reply in replies.items():
        assert is_gold(reply.result(), name), name
    assert d.stats()["preemptions"] > before


WRONG: dict[str, dict[str, Any]] = {
    "an id beyond the vocabulary": {"prompt": [1, 2, VOCAB]},
    "a negative id": {"prompt": [1, -1]},
    "a stop id beyond the vocabulary": {"prompt": [1], "stop_token_ids": [VOCAB]},
    "a bias for an id beyond the vocabulary": {"prompt": [1], "logit_bias": {str(VOCAB): 1}},
    "no token": {"prompt": []},
    "an empty text": {"prompt": ""},
    "one empty text of several": {"prompt": ["a", ""]},
    "beyond the model's context": {"prompt": [29] * 8192},
    "an answer beyond the pool": {"prompt": [29] * 10, "max_tokens": 503},
}


def test_wrong_input_is_the_senders_trouble_alone(cluster: Cluster):
    """A5. Each is a 400 that says so; then a good request works, and no block is missing."""
    free = cluster.worker("decode-0").stats()["free_blocks"]
    for what, body in WRONG.items():
        reply = cluster.complete(body["prompt"], **{k: v for k, v in body.items() if k != "prompt"})
        assert reply.status_code == 400, what
        error = reply.json()["error"]
        assert error["type"] == "invalid_request_error", what
        assert (error["code"] == "context_length_exceeded") == ("beyond the model" in what or "pool" in what)
    assert is_gold(cluster.complete(prompt("story-65"), max_tokens=8), "story-65", 8)
    cluster.wait_idle()
    assert cluster.worker("decode-0").stats()["free_blocks"] == free


def test_twenty_at_once_are_twenty_alone(cluster: Cluster, background: ThreadPoolExecutor):
    """B10. In fp32, batching may change an answer only where its two best tokens are nearly equal."""
    names = [name for name in GOLD if len(prompt(name)) <= 65][:20]
    assert len(names) == 20
    replies = {
        name: background.submit(cluster.complete, prompt(name), cache_salt=fresh_salt(), max_tokens=24)
        for name in names
    }
    differing = [name for name, reply in replies.items() if not is_gold(reply.result(), name, 24)]
    assert differing == []


def test_a_long_prompt_neither_blocks_nor_starves(cluster: Cluster, background: ThreadPoolExecutor):
    """B7. 1. A 400-token prompt is being computed on D, 64 tokens a step.  2. Ten short ones come.
    3. They are answered first.  4. The long one is answered too."""
    ended: dict[str, float] = {}

    def ask(label: str, ids: list[int]) -> list[int]:
        reply = cluster.complete(ids, plan="local", max_tokens=1, cache_salt=fresh_salt())
        ended[label] = time.monotonic()
        return only_choice(reply)["token_ids"]

    steps = cluster.worker("decode-0").stats()["steps"]
    long = background.submit(ask, "long", prompt("story-500")[:400])
    shorts = [background.submit(ask, f"short {i}", prompt("story-15")) for i in range(10)]
    assert [s.result() for s in shorts] == [GOLD["story-15"]["output_ids"][:1]] * 10
    assert len(long.result()) == 1
    assert sum(ended[label] < ended["long"] for label in ended) >= 9
    assert cluster.worker("decode-0").stats()["steps"] >= steps + 7
