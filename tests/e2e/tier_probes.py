"""What the tests of the tiers share: asking GOLD cases, and seeing where their KV came from."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import httpx
from cluster import GOLD, Cluster, Process, fresh_salt, is_gold, prompt, sum_of, wait_until

from checkpoint.open import open_checkpoint
from core.blocks import hash_blocks, num_shareable_blocks
from core.kv import Fingerprint
from core.metric_names import TTFT
from kvtransfer.payload import HEADER_NBYTES, encode_header, read_header

BLOCK_SIZE = 16
BLOCK_NBYTES = BLOCK_SIZE * 46080
"""Of the embedded model in fp32."""

SOURCES = ("device", "host", "disk", "redis", "prefill_worker", "computed")


def num_reusable(case: str) -> int:
    """Tokens of its prompt that may come from elsewhere."""
    return num_shareable_blocks(len(prompt(case)), BLOCK_SIZE) * BLOCK_SIZE


def is_all_from(moved: dict[str, float], tier: str, case: str) -> bool:
    """Whether `ask` found all that can be reused in this tier."""
    reusable = num_reusable(case)
    return moved == {tier: reusable, "computed": len(prompt(case)) - reusable}


def is_from(moved: dict[str, float], tier: str, case: str) -> bool:
    """Whether `ask` found what can be reused in this tier and nowhere else: all of it, or the leading blocks
    of a load that ended since the rest took longer than computing it (a busy machine's disk)."""
    loaded = moved.get(tier, 0)
    whole = 0 < loaded <= num_reusable(case) and loaded % BLOCK_SIZE == 0
    return whole and moved == {tier: loaded, "computed": len(prompt(case)) - loaded}


def came_from(worker: Process) -> dict[str, float]:
    """Prompt tokens by the source of their KV, ever since this worker began."""
    metrics = worker.metrics()
    return {
        source: sum_of(metrics, "baton_prompt_tokens_by_source_total", source=source) for source in SOURCES
    }


def ask(cluster: Cluster, salt: str, case: str, plan: str = "local", max_tokens: int = 8) -> dict[str, float]:
    """Answer a GOLD case rightly; returns where its prompt's KV came from, as the decode worker saw it."""
    d = cluster.worker("decode-0")
    before = came_from(d)
    reply = cluster.complete(prompt(case), plan=plan, cache_salt=salt, max_tokens=max_tokens)
    assert is_gold(reply, case, max_tokens), f"{case} was answered with other tokens than GOLD's"
    after = came_from(d)
    moved = {source: after[source] - before[source] for source in after if after[source] != before[source]}
    assert sum(moved.values()) == len(prompt(case))
    assert 0 <= cached_tokens(reply) - own_tokens(moved) <= moved.get("prefill_worker", 0)
    return moved


def own_tokens(moved: dict[str, float]) -> float:
    """What the decode worker found in its own pool and tiers."""
    return sum(tokens for source, tokens in moved.items() if source not in ("prefill_worker", "computed"))


def cached_tokens(reply: httpx.Response) -> int:
    """What nobody computed for this answer, as its client is told."""
    return reply.json()["usage"]["prompt_tokens_details"]["cached_tokens"]


def push_out(cluster: Cluster, num_blocks: int, plan: str = "local") -> None:
    """Other prompts take at least `num_blocks` blocks of pool and tiers."""
    case = "story-257"
    for _ in range(-(-num_blocks // (len(GOLD[case]["prompt_ids"]) // BLOCK_SIZE))):
        reply = cluster.complete(prompt(case), plan=plan, cache_salt=fresh_salt(), max_tokens=1)
        assert is_gold(reply, case, 1)


def tier(worker: Process, name: str) -> dict[str, float]:
    """The counters of one tier (`kvtransfer.tier.TierStats`)."""
    body: dict[str, dict[str, dict[str, float]]] = {}

    def answers() -> bool:
        body.update(worker.ready())
        return "tiers" in body

    wait_until(answers, 20)
    return body["tiers"][name]


def corrupt(worker: Process, name: str) -> float:
    return worker.metric("baton_tier_corrupt_blocks_total", tier=name)


def errors(worker: Process, name: str) -> float:
    return worker.metric("baton_tier_errors_total", tier=name)


def breaker(worker: Process, name: str) -> float:
    """Above 0: open or half-open."""
    return worker.metric("baton_tier_breaker_open", tier=name)


def wait_stored(worker: Process, name: str, num_blocks: int, before: dict[str, float]) -> None:
    """Until the tier took this many blocks more than `before`."""
    nbytes = before["store_nbytes"] + num_blocks * BLOCK_NBYTES
    wait_until(
        lambda: tier(worker, name)["store_nbytes"] >= nbytes,
        20,
        lambda: f"{name}: {before} -> {tier(worker, name)}",
    )


def chain(case: str, salt: str) -> list[bytes]:
    """The hashes of the blocks of a case that tiers may hold, in order: the embedded model's, in fp32."""
    return hash_blocks(_namespace(), prompt(case)[: num_reusable(case)], BLOCK_SIZE, salt)


@cache
def _namespace() -> bytes:
    checkpoint = open_checkpoint("")
    config = checkpoint.config
    return Fingerprint(
        model_digest=checkpoint.weights_digest(),
        tokenizer_digest=checkpoint.tokenizer_digest,
        num_layers=config.num_layers,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        block_size=BLOCK_SIZE,
        kv_dtype="fp32",
        rope=config.rope_description,
        max_model_len=config.max_position,
    ).namespace


def block_files(directory: Path) -> set[Path]:
    return set(directory.glob("*/*/*.kv"))


def disk_usage(directory: Path) -> int:
    """Bytes under a directory, as `du --apparent-size` counts them; files may vanish meanwhile."""
    total = 0
    for path in [directory, *directory.rglob("*")]:
        try:
            total += path.lstat().st_size
        except FileNotFoundError:
            continue
    return total


# Damage to stored blocks. Each takes the first two of a chain as they are stored, and where the payload begins.


def truncated(first: bytes, second: bytes, payload_at: int) -> list[bytes]:
    return [first, second[: len(second) // 2]]


def flipped(first: bytes, second: bytes, payload_at: int) -> list[bytes]:
    at = payload_at + BLOCK_NBYTES // 2
    return [first, second[:at] + bytes([second[at] ^ 1]) + second[at + 1 :]]


def swapped(first: bytes, second: bytes, payload_at: int) -> list[bytes]:
    return [second, first]


def foreign(first: bytes, second: bytes, payload_at: int) -> list[bytes]:
    """Intact, but of another model."""
    header = read_header(second)
    assert header
    payload = second[payload_at : payload_at + header.payload_nbytes]
    other = encode_header(bytes(32), header.block_hash, payload)
    return [first, other + second[HEADER_NBYTES:]]


DAMAGES = [(flipped, 1, 1), (truncated, 1, 1), (swapped, 0, 2), (foreign, 1, 1)]
"""With the number of leading blocks that are good afterwards, and of those that are not."""


def ttft_sum(cluster: Cluster) -> float:
    """Seconds to the first token of all requests so far, as the router measured them."""
    return cluster.router.metric(f"{TTFT}_sum")
