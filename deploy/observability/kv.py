"""Where KV is, where it comes from, and what moving it costs."""

from __future__ import annotations

from core import metric_names as m
from deploy.observability.panels import Dashboard, Panel, Row
from deploy.observability.queries import mean, percentiles, rate, series, total
from planning.scaling import KV_USAGE

KV = Dashboard(
    "baton-kv",
    "Baton: KV",
    "Where blocks are, where they come from, and what moving them costs.",
    [
        Row(
            "Pools",
            [
                Panel(
                    "Pool in use",
                    "percentunit",
                    f"The decode pool grows over {KV_USAGE:.0%}. Without room a sequence is preempted.",
                    [("{{worker}}", total(m.KV_USAGE, by="worker"))],
                ),
                Panel(
                    "Blocks",
                    "short",
                    "Cached ones are free and can be hit; a late read may still write into quarantined ones.",
                    [
                        ("{{role}} all", total(m.BLOCKS_TOTAL, by="role")),
                        ("{{role}} free", total(m.BLOCKS_FREE, by="role")),
                        ("{{role}} cached", total(m.BLOCKS_CACHED, by="role")),
                        ("{{role}} quarantined", total(m.BLOCKS_QUARANTINED, by="role")),
                    ],
                ),
                Panel(
                    "Preemptions and evictions",
                    "short",
                    "Each second. A preempted sequence is computed again; an evicted block was cached.",
                    [
                        ("preempted", rate(m.PREEMPTIONS)),
                        ("blocks evicted", rate(m.BLOCKS_EVICTED)),
                    ],
                ),
            ],
        ),
        Row(
            "Where prompts' KV came from",
            [
                Panel(
                    "Prompt tokens by source",
                    "short",
                    "Each second, at decode workers: the pool, a tier, a prefill worker, computed there.",
                    [("{{source}}", rate(m.TOKENS_BY_SOURCE, 'role="decode"', by="source"))],
                ),
                Panel(
                    "Prefix cache",
                    "percentunit",
                    "Of tokens looked up in the pool, found.",
                    [("{{role}}", f"{rate(m.PREFIX_HITS, by='role')} / {rate(m.PREFIX_QUERIES, by='role')}")],
                ),
                Panel(
                    "Tier hits",
                    "percentunit",
                    "Of blocks looked up in a tier, found.",
                    [("{{tier}}", f"{rate(m.TIER_HITS, by='tier')} / {rate(m.TIER_QUERIES, by='tier')}")],
                ),
                Panel(
                    "Loads by the sources chosen",
                    "short",
                    "Each second.",
                    [("{{sources}}", rate(m.LOADS, by="sources"))],
                ),
            ],
        ),
        Row(
            "Handoff from prefill to decode",
            [
                Panel(
                    "Bytes read from peers",
                    "Bps",
                    "By decode worker.",
                    [("{{worker}}", rate(m.TRANSFER_BYTES, by="worker"))],
                ),
                Panel(
                    "Time of a handoff",
                    "s",
                    "Reading a request's blocks; most of it runs while the prefill worker computes.",
                    percentiles(m.TRANSFER_SECONDS),
                ),
                Panel(
                    "Handoffs that did not deliver",
                    "short",
                    "Each minute, by why; what did not come was computed.",
                    [("{{reason}}", f"60 * {rate(m.TRANSFER_FAILURES, by='reason')}")],
                ),
                Panel(
                    "Leases",
                    "short",
                    "Held: prompts that wait for a peer. Expired, each minute: it gave no sign of life.",
                    [
                        ("held", total(m.HELD)),
                        ("expired", f"60 * {rate(m.LEASES_EXPIRED)}"),
                    ],
                ),
            ],
        ),
        Row(
            "Tiers",
            [
                Panel(
                    "Bytes held",
                    "bytes",
                    "By tier, and what it may hold; 0 = it has no cap of its own.",
                    [
                        ("{{tier}}", total(m.TIER_USED_BYTES, by="tier")),
                        ("{{tier}} at most", total(m.TIER_CAPACITY_BYTES, by="tier")),
                    ],
                ),
                Panel(
                    "Bytes loaded and stored",
                    "Bps",
                    "By tier.",
                    [
                        ("{{tier}} loaded", rate(m.TIER_LOAD_BYTES, by="tier")),
                        ("{{tier}} stored", rate(m.TIER_STORE_BYTES, by="tier")),
                    ],
                ),
                Panel(
                    "Speed while at work",
                    "Bps",
                    "Bytes / seconds that the tier was busy.",
                    [
                        ("{{tier}} load", mean(m.TIER_LOAD_BYTES, m.TIER_LOAD_SECONDS, "tier")),
                        ("{{tier}} store", mean(m.TIER_STORE_BYTES, m.TIER_STORE_SECONDS, "tier")),
                    ],
                ),
                Panel(
                    "Breakers",
                    "short",
                    "1: the tier is left alone after faults; 0.5: it is being tried again.",
                    [("{{worker}} {{tier}}", f"max by (worker, tier) ({series(m.TIER_BREAKER_OPEN)})")],
                ),
                Panel(
                    "What went wrong",
                    "short",
                    "Each minute. Corrupt blocks were found out and deleted.",
                    [
                        ("{{tier}} corrupt", f"60 * {rate(m.TIER_CORRUPT, by='tier')}"),
                        ("{{tier}} errors", f"60 * {rate(m.TIER_ERRORS, by='tier')}"),
                        ("{{tier}} stores dropped", f"60 * {rate(m.TIER_DROPPED, by='tier')}"),
                    ],
                ),
                Panel(
                    "Blocks given up for others",
                    "short",
                    "Each second, by tier.",
                    [("{{tier}}", rate(m.TIER_EVICTED, by="tier"))],
                ),
            ],
        ),
    ],
)
