"""Clients that leave: at each stage of a request, streamed or not, its work ends and its memory is free.

The workers' idle invariant (`idle_afterwards`) is the assertion of most of these tests: two seconds
after the connection closed, no gauge is above zero and no block is missing.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from cluster import Cluster, fresh_salt, is_gold, prompt, wait_until

MANY = 1500


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    flags = {"max_num_seqs": 2, "faults": "transfer.read=delay:0.7"}
    with Cluster(transport="shm", max_num_batched_tokens=64, decode_flags=flags) as cluster:
        yield cluster


@pytest.mark.parametrize("stream", [True, False])
class TestAClientLeaves:
    """A7 and C2. Each asks for 1,500 tokens, without an end of its own."""

    @pytest.fixture
    def how(self, stream: bool) -> dict[str, object]:
        return {"stream": stream, "ignore_eos": True, "max_tokens": MANY, "cache_salt": fresh_salt()}

    def test_while_it_decodes(self, cluster: Cluster, how: dict[str, object]):
        d = cluster.worker("decode-0")
        steps = d.stats()["steps"]
        client = cluster.post_only(prompt("story-33"), plan="local", **how)
        wait_until(lambda: d.stats()["steps"] > steps + 3 and d.stats()["running"] == 1, 10)
        client.close()
        cluster.wait_idle()
        assert d.stats()["steps"] < steps + MANY / 2

    def test_while_it_waits_for_its_turn(self, cluster: Cluster, how: dict[str, object]):
        """1. Two requests fill D.  2. A third waits and leaves.  3. The first two go on undisturbed."""
        d = cluster.worker("decode-0")
        busy = [cluster.post_only(prompt("story-17"), plan="local", **how) for _ in range(2)]
        wait_until(lambda: d.stats()["running"] == 2, 10)
        client = cluster.post_only(prompt("story-33"), plan="local", **how)
        wait_until(lambda: d.stats()["waiting"] == 1, 5)
        client.close()
        wait_until(lambda: d.stats()["waiting"] == 0, 2)
        assert d.stats()["running"] == 2
        for other in busy:
            other.close()

    def test_while_the_prefill_worker_computes(self, cluster: Cluster, how: dict[str, object]):
        p = cluster.worker("prefill-0")
        steps = p.stats()["steps"]
        client = cluster.post_only(prompt("story-1000"), plan="disaggregated", **how)
        wait_until(lambda: p.stats()["running"] == 1 and p.stats()["steps"] > steps, 10)
        client.close()

    def test_while_the_prefill_worker_holds_the_blocks(self, cluster: Cluster, how: dict[str, object]):
        d, p = cluster.worker("decode-0"), cluster.worker("prefill-0")
        client = cluster.post_only(prompt("story-128"), plan="disaggregated", **how)
        wait_until(lambda: p.stats()["held"] == 1 and d.stats()["loading"] == 1, 10)
        client.close()


def test_blocks_of_an_aborted_transfer_are_nobody_elses_until_it_ends(cluster: Cluster):
    """C3. 1. A handoff's read is under way.  2. Its client leaves: the read cannot be called back.
    3. At once another request starts; D's pool is small, so it needs the same memory.
    4. Its answer is GOLD, and all blocks come back."""
    d = cluster.restart("decode-0", num_blocks=12)
    client = cluster.post_only(prompt("story-128"), plan="disaggregated", cache_salt=fresh_salt())
    wait_until(lambda: d.stats()["loading"] == 1 and cluster.worker("prefill-0").stats()["held"] == 1, 10)
    client.close()
    reply = cluster.complete(prompt("story-129"), plan="disaggregated", cache_salt=fresh_salt(), max_tokens=8)
    assert is_gold(reply, "story-129", 8)
