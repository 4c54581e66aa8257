"""The master test: however a request is served, fp32 greedy gives GOLD's tokens."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest
from cluster import GOLD, Cluster, matches_gold

from core.blocks import num_shareable_blocks

FEW = ["story-1", "story-16", "story-33", "story-65", "story-257", "text-emoji", "chat-system", "chat-turns"]


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with Cluster() as made:
        yield made


def servable(names: Iterable[str], plan: str, block_size: int) -> list[str]:
    """A prompt without a full block has nothing to hand over."""
    return [
        n for n in names if plan == "local" or num_shareable_blocks(len(GOLD[n]["prompt_ids"]), block_size)
    ]


def serve_all(
    cluster: Cluster, names: list[str], plan: str, salt: str, at_once: int = 8
) -> dict[str, httpx.Response]:
    """Each case once, several at a time, the long ones first."""
    ordered = sorted(names, key=lambda name: -len(GOLD[name]["prompt_ids"]))

    def one(name: str) -> httpx.Response:
        # A salt of its own keeps a case from hitting another's blocks: some prompts start others.
        return cluster.complete(GOLD[name]["prompt_ids"], plan, timeout=600, cache_salt=f"{salt}/{name}")

    with ThreadPoolExecutor(at_once) as pool:
        return dict(zip(ordered, pool.map(one, ordered), strict=True))


def assert_gold(answers: dict[str, httpx.Response], plan: str, block_size: int, hit: bool) -> None:
    wrong = []
    for name, answer in answers.items():
        body = answer.json()
        assert answer.status_code == 200, body
        assert answer.headers["x-baton-plan"] == plan
        if not matches_gold(name, body["choices"][0]["token_ids"]):
            wrong.append(name)
        cached = body["usage"]["prompt_tokens_details"]["cached_tokens"]
        reusable = num_shareable_blocks(len(GOLD[name]["prompt_ids"]), block_size) * block_size
        assert cached == (reusable if hit else 0), name
    assert not wrong, f"other tokens than GOLD, {plan}, block size {block_size}, hit {hit}: {wrong}"


@pytest.mark.parametrize("plan", ["disaggregated", "local"])
def test_a_few_cases_cold_and_hit(cluster: Cluster, plan: str) -> None:
    for hit in (False, True):
        assert_gold(serve_all(cluster, servable(FEW, plan, 16), plan, f"few-{plan}"), plan, 16, hit)
    cluster.wait_idle()


def test_streamed_is_not_streamed(cluster: Cluster) -> None:
    case = GOLD["text-hangul"]
    body = {"prompt": case["prompt_ids"], "temperature": 0, "max_tokens": 48, "stream": True}
    text = ""
    with httpx.stream("POST", f"{cluster.url}/v1/completions", json=body, timeout=60) as stream:
        for line in stream.iter_lines():
            if line.startswith("data: {"):
                text += httpx.Response(200, text=line[6:]).json()["choices"][0]["text"]
    assert text == case["output_text"]
    cluster.wait_idle()


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("transport", "block_size"),
    [*((name, size) for name in ("shm", "nixl") for size in (8, 16, 32)), ("collective", 16)],
)
def test_every_case_disaggregated_and_local(transport: str, block_size: int) -> None:
    """Cold and again as a prefix hit; every block of the long ones travels over the transport. Local plans
    at other block sizes: `tests/engine/test_engine_runner.py`."""
    plans = ["disaggregated", "local"] if (transport, block_size) == ("shm", 16) else ["disaggregated"]
    flags = {"transport": transport, "block_size": block_size, "num_blocks": 36_000 // block_size}
    with Cluster(**flags) as cluster:
        for plan in plans:
            for hit in (False, True):
                names = servable(GOLD, plan, block_size)
                assert_gold(serve_all(cluster, names, plan, plan), plan, block_size, hit)
        decode = cluster.worker("decode-0")
        pulled = decode.metric("baton_prompt_tokens_by_source_total", source="prefill_worker")
        total = sum(len(case["prompt_ids"]) for case in GOLD.values())
        assert pulled > 0.5 * total, "most prompt tokens came over the transport"
        assert decode.metric("baton_kv_transfer_failures_total") == 0
        cluster.wait_idle()
