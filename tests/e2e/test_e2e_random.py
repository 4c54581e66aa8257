"""B4: everything at once, against 64 blocks on each side; afterwards both workers are idle."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from cluster import Cluster, fresh_salt, prompt


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with Cluster(transport="shm", num_blocks=64, max_num_batched_tokens=128) as cluster:
        yield cluster


def test_two_hundred_random_requests_leave_nothing_behind(cluster: Cluster, background: ThreadPoolExecutor):
    """Short, long, in several choices, with stop strings, aborted in the middle, planned both ways:
    every answer is complete or was cut by us, and both workers are idle afterwards."""
    rng = random.Random(11)
    jobs = [random_job(cluster, random.Random(rng.random())) for _ in range(200)]
    outcomes = [future.result() for future in [background.submit(job) for job in jobs]]
    assert [o for o in outcomes if o not in ("answered", "left")] == []
    assert outcomes.count("left") >= 20
    assert cluster.worker("decode-0").metric("baton_faults_total") == 0
    assert cluster.worker("prefill-0").metric("baton_faults_total") == 0


def random_job(cluster: Cluster, rng: random.Random) -> Callable[[], str]:
    length = rng.choice([1, 15, 16, 17, 40, 64, 100, 200, 300])
    at = rng.randrange(100)
    ids = prompt("story-1000")[at : at + length]
    body: dict[str, Any] = {
        "plan": rng.choice(["auto", "local", "disaggregated"] if length > 16 else ["auto", "local"]),
        "max_tokens": rng.choice([1, 2, 4, 8, 20]),
        "n": rng.choice([1, 1, 1, 2, 3]),
        "temperature": rng.choice([0, 1.0]),
        "seed": rng.randrange(1000),
        "stop": rng.choice([None, [" the"], ["\n", "."]]),
        "cache_salt": rng.choice(["", "", fresh_salt()]),
    }
    leaves_after = rng.choice([None, None, None, 0.0, 0.05, 0.3])

    def answered() -> str:
        reply = cluster.complete(ids, **body)
        if reply.status_code != 200:
            return reply.text
        choices = reply.json()["choices"]
        whole = len(choices) == body["n"] and all(c["finish_reason"] in ("stop", "length") for c in choices)
        return "answered" if whole else reply.text

    def left() -> str:
        client = cluster.post_only(ids, ignore_eos=True, stream=rng.random() < 0.5, **body)
        time.sleep(leaves_after or 0)
        client.close()
        return "left"

    return answered if leaves_after is None else left
