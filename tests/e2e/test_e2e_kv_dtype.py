"""KV of 8 bits with its scales: over shm from P to D, back from host RAM, and never between unlike pools."""

from __future__ import annotations

from cluster import Cluster, fresh_salt, only_choice, prompt
from tier_probes import came_from

CASE, NUM_TOKENS, REUSABLE = "story-129", 24, 128
BYTES_PER_TOKEN = 30 * 3 * 2 * (64 + 2)
"""Of the embedded model in int8: 8 bits a number, a bf16 scale for each token and head."""


def test_int8_blocks_travel_with_their_scales():
    """1. D computes a prompt alone.  2. P computes it, D takes the blocks: the same tokens.  3. Other prompts push
    it out of D's pool, host RAM gives it back: the same tokens.  4. P comes back with a layer left out: refused."""
    with Cluster(kv_cache_dtype="int8", transport="shm", num_blocks=40, host_cache_bytes="32MiB") as cluster:
        d = cluster.worker("decode-0")

        def ask(plan: str, salt: str) -> tuple[list[int], dict[str, float]]:
            before = came_from(d)
            reply = cluster.complete(prompt(CASE), plan=plan, cache_salt=salt, max_tokens=NUM_TOKENS)
            tokens, after = only_choice(reply)["token_ids"], came_from(d)
            return tokens, {name: after[name] - before[name] for name in after if after[name] > before[name]}

        footprint = d.ready()["footprint"]
        assert (footprint["kv_dtype"], footprint["bytes_per_token"]) == ("int8", BYTES_PER_TOKEN)
        assert footprint["kv_nbytes"] == 40 * 16 * BYTES_PER_TOKEN
        local, source = ask("local", fresh_salt())
        assert source == {"computed": 129}
        salt = fresh_salt()
        handed_over, source = ask("disaggregated", salt)
        assert (handed_over, source) == (local, {"prefill_worker": REUSABLE, "computed": 1})
        for _ in range(3):
            cluster.complete(prompt("story-257"), plan="local", cache_salt=fresh_salt(), max_tokens=1)
        assert ask("local", salt) == (local, {"host": REUSABLE, "computed": 1})

        cluster.restart("prefill-0", state="incompatible", kv_quant_skip_layers="29")
        listed = next(w for w in cluster.cluster() if w["id"] == "prefill-0")
        assert "kv_dtype" in listed["reason"]
        assert "int8/skip=29" in listed["reason"]
        assert ask("local", fresh_salt())[0] == local
