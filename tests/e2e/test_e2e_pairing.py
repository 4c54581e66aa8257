"""C7: a prefill worker that is configured otherwise is named, and nobody is sent to the pair."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from cluster import Cluster, is_gold, prompt


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with Cluster(transport="shm", num_blocks=64) as cluster:
        yield cluster


@pytest.mark.parametrize(
    ("flags", "field"),
    [
        ({"block_size": 32}, "block_size"),
        ({"dtype": "bf16"}, "kv_dtype"),
        pytest.param({"max_model_len": 1000}, "max_model_len", marks=pytest.mark.slow),
    ],
)
def test_one_field_differs(cluster: Cluster, flags: dict[str, object], field: str):
    """1. P comes back with other flags.  2. /v1/cluster says what differs.  3. By itself the router plans
    without P; the answer is GOLD.  4. Forced, it refuses and names the field.  5. P was never asked."""
    p = cluster.restart("prefill-0", state="incompatible", **flags)
    listed = next(w for w in cluster.cluster() if w["id"] == "prefill-0")
    assert field in listed["reason"]
    reply = cluster.complete(prompt("story-65"), max_tokens=8)
    assert is_gold(reply, "story-65", 8)
    assert reply.headers["x-baton-plan"] == "local"
    assert reply.headers["x-baton-reason"] == "no_compatible_prefill"
    forced = cluster.complete(prompt("story-65"), plan="disaggregated", max_tokens=8)
    error = forced.json()["error"]
    assert (forced.status_code, error["code"]) == (503, "unavailable")
    assert field in error["message"]
    assert p.stats()["steps"] == 0
