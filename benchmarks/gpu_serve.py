"""`baton serve` with P and D on one GPU, as a client meets it; run by `benchmarks.gpu`."""

from __future__ import annotations

import random
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from statistics import median
from typing import Any

import httpx

from benchmarks.serving import served

PROMPT, ANSWER = 1024, 64
CONCURRENCY, REQUESTS = 16, 64
VOCABULARY = range(1000, 40_000)
FLAGS = (
    "--device=cuda",
    "--transport=nixl",
    "--dtype=bf16",
    "--max-num-batched-tokens=2048",
    "--max-model-len=4096",
    "--gpu-memory-utilization=0.5",
)
EQUAL_TOKENS = 8
"""Greedy answers of both ways must agree so far; later a near tie may flip in bf16."""


@dataclass(frozen=True, slots=True)
class Answer:
    token_ids: list[int]
    plan: str
    seconds: float


def check_serve(model: str, deadline: float) -> list[str]:
    """Print what the server reaches; a sentence for each thing that is wrong.

    Raises SystemExit when it is not done by `deadline`, in `time.monotonic()`.
    """
    with (
        served(*FLAGS, f"--model={model}", deadline=deadline) as url,
        httpx.Client(base_url=url) as client,
    ):
        name = client.get("/v1/models").json()["data"][0]["id"]
        prompts = [random.Random(i).choices(VOCABULARY, k=PROMPT) for i in range(REQUESTS)]

        def ask(prompt: list[int], plan: str, max_tokens: int = ANSWER, salt: str = "") -> Answer:
            return _ask(client, name, prompt, plan, max_tokens, salt, deadline)

        for plan in ("local", "disaggregated"):
            ask(prompts[0], plan, salt=f"warm-{plan}")
        pairs = [
            [ask(prompt, plan, salt=f"{i}-{plan}") for plan in ("local", "disaggregated")]
            for i, prompt in enumerate(prompts[:8])
        ]
        first = [
            [ask(prompt, plan, 1, f"first-{i}-{plan}").seconds for plan in ("local", "disaggregated")]
            for i, prompt in enumerate(prompts[:8])
        ]
        began = time.perf_counter()
        with ThreadPoolExecutor(CONCURRENCY) as threads:
            many = list(threads.map(lambda prompt: ask(prompt, "disaggregated"), prompts))
        took = time.perf_counter() - began
        moved = _moved_nbytes(client)
    local_s, apart_s = (median(times) for times in zip(*first, strict=True))
    print(f"`baton serve`, P and D on one GPU, {PROMPT} tokens in, {ANSWER} out:\n")
    print("| TTFT local, ms | TTFT over P, ms | requests at once | output tok/s | KV moved, MB |")
    print("|---:|---:|---:|---:|---:|")
    rate = sum(len(answer.token_ids) for answer in many) / took
    print(f"| {local_s * 1e3:.1f} | {apart_s * 1e3:.1f} | {CONCURRENCY} | {rate:.0f} | {moved / 1e6:.0f} |")
    return _wrong(pairs, many, moved)


def _wrong(pairs: list[list[Answer]], many: list[Answer], moved: float) -> list[str]:
    found = []
    if not moved:
        found.append("no KV was moved from P to D; the workers' logs above say why")
    for local, apart in pairs:
        if apart.plan != "disaggregated":
            found.append(f"a request that asked for the handoff was planned {apart.plan}")
        if local.token_ids[:EQUAL_TOKENS] != apart.token_ids[:EQUAL_TOKENS]:
            got, want = apart.token_ids[:EQUAL_TOKENS], local.token_ids[:EQUAL_TOKENS]
            found.append(f"after the handoff the answer begins {got}, computed locally {want}")
    short = sum(len(answer.token_ids) != ANSWER for answer in many)
    if short:
        found.append(f"{short} of {len(many)} requests at once did not give {ANSWER} tokens")
    return found


def _ask(
    client: httpx.Client,
    model: str,
    prompt: list[int],
    plan: str,
    max_tokens: int,
    salt: str,
    deadline: float,
) -> Answer:
    began, left_s = time.perf_counter(), deadline - time.monotonic()
    if left_s <= 0:
        raise SystemExit("the time for this check is over and requests are left; see LIMIT_S")
    body: dict[str, Any] = {"model": model, "prompt": prompt, "max_tokens": max_tokens, "temperature": 0}
    body |= {"return_token_ids": True, "ignore_eos": True} | ({"cache_salt": salt} if salt else {})
    try:
        reply = client.post("/v1/completions", json=body, headers={"X-Baton-Plan": plan}, timeout=left_s)
    except httpx.TimeoutException:
        raise SystemExit(f"a request was not answered in the {left_s:.0f} s that were left") from None
    seconds = time.perf_counter() - began
    if reply.status_code != 200:
        raise SystemExit(f"a request failed with {reply.status_code}: {reply.text[:300]}")
    return Answer(reply.json()["choices"][0]["token_ids"], reply.headers["x-baton-plan"], seconds)


def _moved_nbytes(client: httpx.Client) -> float:
    """What all workers pulled from peers."""
    moved = 0.0
    for worker in client.get("/v1/cluster").json()["workers"]:
        for line in httpx.get(f"http://{worker['addresses']['probes']}/metrics").text.splitlines():
            if line.startswith("baton_kv_transfer_bytes_total"):
                moved += float(line.rpartition(" ")[2])
    return moved
