"""Prefill on one process, decode on another: the handoff is used, and nobody can tell by the answer."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator
from typing import Any

import httpx
import pytest
from cluster import GOLD, Cluster, fresh_salt, is_gold, matches_gold, only_choice, prompt, wait_until

BYTES_PER_TOKEN = 2 * 30 * 3 * 64 * 4  # K and V, layers, KV heads, head dim, fp32
MOVED = "baton_kv_transfer_bytes_total"
BY_SOURCE = "baton_prompt_tokens_by_source_total"


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with Cluster(transport="shm", max_num_batched_tokens=64) as cluster:
        yield cluster


def cached_tokens(reply: httpx.Response) -> int:
    return reply.json()["usage"]["prompt_tokens_details"]["cached_tokens"]


def test_the_blocks_come_from_the_prefill_worker(cluster: Cluster):
    """128 tokens are 7 full blocks for others to make and 16 tokens for D; P keeps nothing."""
    d, p = cluster.worker("decode-0"), cluster.worker("prefill-0")

    def counts() -> list[float]:
        return [d.metric(MOVED), *(d.metric(BY_SOURCE, source=s) for s in ("prefill_worker", "computed"))]

    before, p_steps = counts(), p.stats()["steps"]
    reply = cluster.complete(
        prompt("story-128"), plan="disaggregated", cache_salt=fresh_salt(), max_tokens=16
    )
    assert is_gold(reply, "story-128", 16)
    assert reply.headers["x-baton-plan"] == "disaggregated"
    assert (reply.headers["x-baton-prefill"], reply.headers["x-baton-decode"]) == ("prefill-0", "decode-0")
    moved = [after - earlier for after, earlier in zip(counts(), before, strict=True)]
    assert moved == [112 * BYTES_PER_TOKEN, 112, 16]
    assert p.stats()["steps"] > p_steps
    cluster.wait_idle()
    assert p.stats()["cached_blocks"] >= 7
    assert p.metric("baton_num_requests_held") == p.metric("baton_num_requests_running") == 0
    assert p.metric("baton_kv_blocks_free") == p.metric("baton_kv_blocks_total")


@pytest.mark.parametrize("transport", ["nixl", "collective"])
def test_over_another_transport(transport: str):
    with Cluster(transport=transport, num_blocks=64) as cluster:
        d = cluster.worker("decode-0")
        reply = cluster.complete(prompt("story-65"), plan="disaggregated", max_tokens=8)
        assert is_gold(reply, "story-65", 8)
        assert d.metric(MOVED) == 64 * BYTES_PER_TOKEN
        assert d.metric("baton_kv_transfer_failures_total") == 0
        cluster.wait_idle()


@pytest.mark.parametrize("n", [1, 2])
def test_streamed_or_whole_local_or_handed_over_the_answer_is_one(cluster: Cluster, n: int):
    """C4. The first token is neither lost nor doubled, and its log probability is there."""
    how: dict[str, Any] = {"n": n, "logprobs": 2, "max_tokens": 10}
    how |= {"temperature": 1.0, "seed": 7} if n > 1 else {}
    answers = []
    for plan in ("local", "disaggregated"):
        whole = cluster.complete(prompt("story-33"), plan=plan, cache_salt=fresh_salt(), **how)
        answers.append(whole.json())
        options = {"include_usage": True}
        with cluster.stream(
            prompt("story-33"), plan=plan, cache_salt=fresh_salt(), stream_options=options, **how
        ) as chunks:
            answers.append(joined(chunks))
    first = answers[0]
    assert len(first["choices"]) == n
    assert first["usage"]["completion_tokens"] == 10 * n
    assert n == 1 or first["choices"][0]["token_ids"] != first["choices"][1]["token_ids"]
    for other in answers[1:]:
        assert other["usage"] == first["usage"]
        for ours, theirs in zip(other["choices"], first["choices"], strict=True):
            for field in ("index", "token_ids", "text", "finish_reason"):
                assert ours[field] == theirs[field], field
            assert len(ours["logprobs"]["token_logprobs"]) == 10
            assert ours["logprobs"]["tokens"] == theirs["logprobs"]["tokens"]
            assert ours["logprobs"]["token_logprobs"] == pytest.approx(
                theirs["logprobs"]["token_logprobs"], abs=1e-3
            )
    if n == 1:
        assert matches_gold("story-33", first["choices"][0]["token_ids"], 10)


def joined(chunks: Iterable[dict[str, Any]]) -> dict[str, Any]:
    """A stream's events put together into the shape of the whole answer."""
    choices: dict[int, dict[str, Any]] = {}
    usage, done = None, False
    for chunk in chunks:
        assert "error" not in chunk, chunk
        done = chunk.get("done", False)
        usage = chunk.get("usage") or usage
        for piece in chunk.get("choices", ()):
            empty = {"index": piece["index"], "token_ids": [], "text": "", "finish_reason": None}
            logprobs = {"tokens": [], "token_logprobs": []}
            choice = choices.setdefault(piece["index"], empty | {"logprobs": logprobs})
            assert choice["finish_reason"] is None, "a choice goes on after its end"
            choice["token_ids"] += piece.get("token_ids", [])
            choice["text"] += piece["text"]
            choice["finish_reason"] = piece["finish_reason"]
            for kind in logprobs if piece["logprobs"] else ():
                choice["logprobs"][kind] += piece["logprobs"][kind]
    assert done
    return {"choices": [choices[index] for index in sorted(choices)], "usage": usage}


def test_a_hit_of_the_whole_prompt_leaves_something_to_compute(cluster: Cluster):
    """B1. Whatever is cached, the last token or block is computed again: a token needs logits."""
    salt = fresh_salt()
    for name, hit in (("story-15", 0), ("story-16", 0), ("story-17", 16), ("story-32", 16), ("story-33", 32)):
        own = f"{salt}-{name}"  # the stories are prefixes of each other
        for expected in (0, hit):
            plan = "disaggregated" if len(prompt(name)) > 16 else "auto"  # without a full block: no handoff
            reply = cluster.complete(prompt(name), plan=plan, cache_salt=own, max_tokens=6)
            assert is_gold(reply, name, 6), (name, expected)
            assert cached_tokens(reply) == expected, name


def test_a_repetition_penalty_sees_the_prompt_however_that_came(cluster: Cluster):
    """B9. Cold, handed over and hit give the same penalized tokens."""
    cold, handed_over = fresh_salt(), fresh_salt()
    ids = []
    for plan, salt in (
        ("local", cold), ("disaggregated", handed_over), ("local", cold), ("disaggregated", handed_over)
    ):  # fmt: skip
        reply = cluster.complete(
            prompt("story-64"), plan=plan, cache_salt=salt, repetition_penalty=1.3, max_tokens=20
        )
        ids.append(only_choice(reply)["token_ids"])
    assert ids[1:] == ids[:1] * 3
    assert not matches_gold("story-64", ids[0], 20), "the penalty changed nothing"


@pytest.mark.parametrize("plan", ["local", "disaggregated"])
def test_one_token_is_one_token(cluster: Cluster, plan: str):
    """C5. max_tokens 1: D makes one step, the one that computes what is left of the prompt."""
    steps = cluster.worker("decode-0").stats()["steps"]
    reply = cluster.complete(prompt("story-33"), plan=plan, cache_salt=fresh_salt(), max_tokens=1)
    choice = only_choice(reply)
    assert choice["finish_reason"] == "length"
    assert choice["token_ids"] == GOLD["story-33"]["output_ids"][:1]
    assert reply.json()["usage"]["completion_tokens"] == 1
    cluster.wait_idle()
    assert cluster.worker("decode-0").stats()["steps"] == steps + 1


@pytest.mark.parametrize("plan", ["local", "disaggregated"])
def test_an_answer_may_end_with_its_first_token(cluster: Cluster, plan: str):
    """C5. A first token that ends the text: empty text, "stop", no blocks left."""
    reply = cluster.complete(
        prompt("story-33"), plan=plan, cache_salt=fresh_salt(), logit_bias={"2": 100}, max_tokens=20
    )
    choice = only_choice(reply)
    assert (choice["text"], choice["finish_reason"]) == ("", "stop")


def test_blocks_arrive_while_the_prompt_is_still_being_computed(cluster: Cluster):
    """1. A 1,000-token prompt is handed over.  2. While P computes it in chunks, another request for its
    first 129 tokens finds 128 of them on D.  3. P computes still.  4. The long answer is GOLD."""
    p, salt = cluster.worker("prefill-0"), fresh_salt()
    replies: list[httpx.Response] = []
    long = threading.Thread(
        target=lambda: replies.append(
            cluster.complete(prompt("story-1000"), plan="disaggregated", cache_salt=salt, max_tokens=4)
        )
    )
    steps = p.stats()["steps"]
    long.start()
    try:
        wait_until(lambda: p.stats()["steps"] >= steps + 4, 20)
        early = cluster.complete(prompt("story-129"), plan="local", cache_salt=salt, max_tokens=1)
        assert p.stats()["running"] == 1, "P was done too early for this test to mean something"
    finally:
        long.join(60)
    assert cached_tokens(early) == 128
    assert is_gold(early, "story-129", 1)
    assert is_gold(replies[0], "story-1000", 4)
