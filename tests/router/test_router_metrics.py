"""What /metrics exports: the names that dashboards hold on to, and never a series that a client made up."""

from __future__ import annotations

import asyncio
import json
import random
import string
from pathlib import Path

from metric_text import families, series
from router_stack import Stack

from core import metric_names

GOLDEN = Path(__file__).parents[1] / "data" / "router_metrics.txt"
KEY = "k" * 20
METHODS = ("GET", "GET", "GET", "POST", "DELETE", "PUT", "HEAD", "OPTIONS")


async def scrape(stack: Stack) -> str:
    reply = await stack.http.get("/metrics")
    assert reply.status_code == 200
    return reply.text


async def send_all(stack: Stack, requests: list[bytes]) -> int:
    """All over one connection, the next without waiting for the last one's answer; how many were answered."""
    reader, writer = await asyncio.open_connection("127.0.0.1", int(stack.url.rpartition(":")[2]))
    writer.write(b"".join(requests) + b"GET /health HTTP/1.1\r\nconnection: close\r\n\r\n")
    answers = await reader.read()
    writer.close()
    return answers.count(b"HTTP/1.1 ") - 1


def request(method: str, path: str, body: object = None, **headers: str) -> bytes:
    content = b"" if body is None else json.dumps(body).encode()
    lines = [f"{name.replace('_', '-')}: {value}" for name, value in headers.items()]
    head = "\r\n".join([f"{method} {path} HTTP/1.1", "host: x", f"content-length: {len(content)}", *lines])
    return head.encode() + b"\r\n\r\n" + content


def scanners(model: str, count: int, rng: random.Random) -> list[bytes]:
    """Random paths under random methods, and random model names, users, plans and keys."""

    def junk() -> str:
        letters = string.ascii_letters + string.digits + "/%-_.~"
        return "".join(rng.choices(letters, k=rng.randint(1, 40)))

    sent = []
    for i in range(count):
        key = {"authorization": f"Bearer {junk() if i % 7 == 0 else KEY}"}
        sent.append(request(METHODS[i % len(METHODS)], f"/{junk()}", **key))
        sent.append(request("GET", f"/v1/models/{junk()}", **key))
        named = junk() if i % 50 else model
        body = {"model": named, "prompt": "hi", "max_tokens": 1, "user": junk()}
        more = {"x_request_id": junk()} | ({"x_baton_plan": junk()} if i % 3 == 0 else {})
        path = "/v1/chat/completions" if i % 2 else "/v1/completions"
        sent.append(request("POST", path, body, **key, **more))
    return sent


async def test_neither_paths_nor_model_names_nor_keys_make_series(stack_of) -> None:
    """E8. 1. Scanners come, and each kind of answer is given.  2. They come again with 1,000 other paths, 1,000
    other models and keys.  3. There are as many series as before."""
    rng = random.Random(7)
    async with stack_of(key=KEY) as stack:
        await scrape(stack)
        seen = []
        for count in (300, 1000):
            sent = scanners(stack.model, count, rng)
            assert await send_all(stack, sent) == len(sent)
            seen.append(series(await scrape(stack)))
    by_chance = metric_names.TTFT_ESTIMATE_BIAS.removesuffix("_total")  # over or under, as it happens
    assert [each for each in seen[1] - seen[0] if not each.startswith(by_chance)] == []


async def test_the_names_are_those_that_dashboards_know(stack_of) -> None:
    """Who renames a metric has to say so here, and in the release notes."""
    async with stack_of() as stack:
        await stack.client.completions.create(model=stack.model, prompt="hi", max_tokens=2)
        exported = families(await scrape(stack))
    assert exported == set(GOLDEN.read_text().split())
    assert {name for name in exported if not name.startswith("vllm:")} <= declared()
    assert {name for name in exported if name.startswith("vllm:")} <= set(metric_names.VLLM_ALIASES)


def declared() -> set[str]:
    values = [value for value in vars(metric_names).values() if isinstance(value, str)]
    return {value for value in values if value.startswith("baton_")}
