"""A worker as `/v1/cluster` shows it."""

from __future__ import annotations

from typing import Any

from services.router.roster import Member
from services.router.standing import WorkerState
from wire.v1 import worker_pb2 as pb


def describe(member: Member, worker_state: WorkerState, reason: str) -> dict[str, Any]:
    """Counts are of the last State; null while there is none."""
    hello, state = member.hello, member.state
    fingerprint = member.fingerprint
    described: dict[str, Any] = {
        "id": member.worker_id,
        "role": member.role or None,
        "state": worker_state.value,
        "reason": reason or None,
        "host": hello.host if hello else None,
        "pid": hello.pid if hello else None,
        "addresses": {
            "discovered": member.address,
            "grpc": hello.address if hello else None,
            "probes": hello.probe_address if hello else None,
        },
        "incarnation": hello.incarnation if hello else None,
        "version": hello.version if hello else None,
        "dtype": hello.dtype if hello else None,
        "transports": list(hello.transports) if hello else [],
        "fingerprint": fingerprint.as_dict() if fingerprint else None,
        "total_blocks": hello.total_blocks if hello else None,
    }
    for count in ("free_blocks", "cached_blocks", "running", "waiting", "loading", "held", "steps"):
        described[count] = getattr(state, count) if state else None
    described["tiers"] = {tier.tier: _describe_tier(tier) for tier in state.tiers} if state else None
    return described


def _describe_tier(tier: pb.TierState) -> dict[str, Any]:
    """All but `hit_blocks` and `breaker` are 0 for Redis: its server alone knows what it holds."""
    return {
        "used_bytes": tier.used_bytes,
        "capacity_bytes": tier.capacity_bytes,
        "blocks": tier.blocks,
        "hit_blocks": tier.hit_blocks,
        "breaker": tier.breaker or None,
    }
