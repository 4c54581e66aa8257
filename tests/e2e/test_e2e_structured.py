"""Constrained answers from real processes and the embedded model (pain A10)."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Annotated, Any, Literal

import httpx
import openai
import pytest
from cluster import Cluster, fresh_salt, only_choice
from pydantic import BaseModel, Field

SCHEMA = {
    "type": "object",
    "properties": {"n": {"type": "integer", "minimum": 0, "maximum": 99999}},
    "required": ["n"],
    "additionalProperties": False,
}
PROMPT = (
    "Pick a number for each of the three towns that lie along the river, and write it down as a JSON object with "
    "the key n, since the clerk who reads the list knows no other form: "
)
FORMAT = {"type": "json_schema", "json_schema": {"name": "number", "schema": SCHEMA}}


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with Cluster() as running:
        yield running


def ask(cluster: Cluster, plan: str = "auto", **more: Any) -> httpx.Response:
    return cluster.complete(PROMPT, plan, **{"temperature": 1.0, "max_tokens": 24, "seed": 1} | more)


def test_fifty_seeds_parse_or_were_cut(cluster: Cluster, background: ThreadPoolExecutor) -> None:
    replies = background.map(lambda seed: ask(cluster, seed=seed, response_format=FORMAT), range(50))
    choices = [only_choice(reply) for reply in replies]
    done = [json.loads(choice["text"]) for choice in choices if choice["finish_reason"] == "stop"]
    assert len(done) == 50, "the schema bounds the number, so nothing can go on for ever"
    assert all(set(value) == {"n"} and 0 <= value["n"] <= 99999 for value in done)
    assert len({value["n"] for value in done}) > 5


def test_a_limit_may_cut_the_json_and_says_so(cluster: Cluster) -> None:
    choice = only_choice(ask(cluster, max_tokens=3, response_format=FORMAT))
    assert choice["finish_reason"] == "length"
    assert len(choice["token_ids"]) == 3
    with pytest.raises(ValueError):
        json.loads(choice["text"])


@pytest.mark.parametrize(
    ("asked", "pattern"),
    [
        ({"regex": r"[A-Z][a-z]{2,8}, \d{4}"}, r"[A-Z][a-z]{2,8}, [0-9]{4}"),
        ({"choice": ["the sea", "the hills", "both"]}, "the sea|the hills|both"),
        ({"grammar": 'root ::= [a-z] ("+" [a-z]){2}'}, r"[a-z](\+[a-z]){2}"),
        ({"grammar": 'start: "<" start ">" | "x" | "y"'}, "<*[xy]>*"),
        ({"json": {"enum": ["on", "off", 7]}}, '"on"|"off"|7'),
    ],
)
def test_each_kind_of_grammar_holds_beside_penalties(cluster: Cluster, asked: Any, pattern: str) -> None:
    penalties = {"repetition_penalty": 1.3, "presence_penalty": 1.0, "frequency_penalty": 0.5}
    for extra in ({}, penalties, {"min_tokens": 20}, {"ignore_eos": True}):
        choice = only_choice(ask(cluster, structured_outputs=asked, logprobs=2, **extra))
        assert choice["finish_reason"] == "length" or re.fullmatch(pattern, choice["text"]), choice["text"]
        assert len(choice["logprobs"]["tokens"]) == len(choice["token_ids"])


def test_any_object_is_json_when_it_ends(cluster: Cluster) -> None:
    for asked in (
        {"response_format": {"type": "json_object"}},
        {"structured_outputs": {"json_object": True}},
    ):
        choice = only_choice(ask(cluster, max_tokens=40, stop=["}"], **asked))
        assert choice["text"].startswith("{")
        assert not re.search(r"\s\s", re.sub(r'"[^"]*"?', "", choice["text"])), "no runs of whitespace"


def test_choices_go_their_own_ways(cluster: Cluster) -> None:
    regex = {"regex": "(red|green|blue|grey)( (red|green|blue|grey)){3}"}
    reply = ask(cluster, n=4, temperature=1.8, structured_outputs=regex)
    assert reply.status_code == 200, reply.text
    texts = [choice["text"] for choice in reply.json()["choices"]]
    assert all(re.fullmatch(regex["regex"], text) for text in texts), texts
    assert len(set(texts)) > 1


def test_both_plans_give_the_same_tokens(cluster: Cluster) -> None:
    answers = [
        only_choice(ask(cluster, plan, cache_salt=fresh_salt(), response_format=FORMAT, seed=11, n=1))
        for plan in ("local", "disaggregated", "local")
    ]
    assert answers[0]["token_ids"] == answers[1]["token_ids"] == answers[2]["token_ids"]


def test_words_and_tokens_can_be_ruled_out(cluster: Cluster) -> None:
    free = only_choice(ask(cluster, temperature=0))
    word = free["text"].split()[0]
    bare = only_choice(ask(cluster, temperature=0, bad_words=[word]))
    assert word not in bare["text"].split()
    allowed = sorted(set(free["token_ids"]) - set(free["token_ids"][:1]))
    held = only_choice(ask(cluster, temperature=0, allowed_token_ids=allowed))
    assert set(held["token_ids"]) <= set(allowed)


def test_a_grammar_that_only_the_worker_can_judge_is_a_400(cluster: Cluster) -> None:
    reply = ask(cluster, structured_outputs={"grammar": "start: <[999999]>"})
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, "structured_outputs")
    assert "999999" in reply.json()["error"]["message"]


def test_the_official_client(cluster: Cluster) -> None:
    client = openai.OpenAI(base_url=f"{cluster.url}/v1", api_key="none", timeout=60)
    turns: Any = [{"role": "user", "content": "How many legs has a spider? Answer in JSON."}]
    format_: Any = {"type": "json_schema", "json_schema": {"name": "legs", "schema": SCHEMA, "strict": True}}
    answer = client.chat.completions.create(
        model=cluster.model, messages=turns, response_format=format_, max_tokens=24
    )
    assert answer.choices[0].finish_reason == "stop"
    assert set(json.loads(answer.choices[0].message.content or "")) == {"n"}
    with client.chat.completions.create(
        model=cluster.model, messages=turns, response_format=format_, max_tokens=24, stream=True
    ) as stream:
        text = "".join(chunk.choices[0].delta.content or "" for chunk in stream)
    assert set(json.loads(text)) == {"n"}

    class Legs(BaseModel):
        kind: Literal["spider", "beetle"]
        legs: Annotated[int, Field(ge=0, le=100)] | None

    parsed = client.chat.completions.parse(
        model=cluster.model, messages=turns, response_format=Legs, max_tokens=40
    )
    assert isinstance(parsed.choices[0].message.parsed, Legs)
