"""Prefill in bf16, decode in int8: only the KV dtype must agree."""

from __future__ import annotations

from cluster import Cluster, is_gold, prompt


def test_an_int8_decode_worker_takes_blocks_of_a_bf16_prefill_worker():
    """1. The pair is compatible.  2. D reads P's blocks.  3. Its answer, where GOLD's best tokens lead by 1.6
    and more in log probability, is GOLD's."""
    with Cluster(
        prefill_flags={"dtype": "bf16"},
        decode_flags={"dtype": "fp32", "quantization": "int8"},
        kv_cache_dtype="bf16",
        transport="shm",
        num_blocks=64,
    ) as cluster:
        p, d = cluster.worker("prefill-0"), cluster.worker("decode-0")
        reply = cluster.complete(prompt("chat-math"), plan="disaggregated", max_tokens=12)
        assert is_gold(reply, "chat-math", 12)
        assert reply.headers["x-baton-plan"] == "disaggregated"
        assert d.metric("baton_prompt_tokens_by_source_total", source="prefill_worker") == 32
        assert d.metric("baton_kv_transfer_failures_total") == 0
        ours, theirs = d.ready()["footprint"], p.ready()["footprint"]
        assert (ours["quantization"], theirs["quantization"]) == ("int8", "none")
        assert ours["weights_nbytes"] < 0.52 * theirs["weights_nbytes"]
        cluster.wait_idle()
