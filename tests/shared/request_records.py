"""Requests as a router's records have them, made without a router."""

from __future__ import annotations

from collections.abc import Sequence

from core.kv import Fingerprint
from core.request import Gathered, PlanKind
from planning.estimate import Estimate, Option, Targets
from planning.plan import Plan, Reason
from planning.worker_view import WorkerView
from services.router.record import Record

PRINT = Fingerprint("m", "t", 30, 3, 64, 16, "fp32", "default/100000", 8192)


def estimate(ttft_s: float, **parts: float) -> Estimate:
    """`ttft_s` of computing alone, unless `parts` say otherwise."""
    values = {
        "wait_s": 0.0,
        "prefill_s": ttft_s,
        "transfer_s": 0.0,
        "load_s": 0.0,
        "itl_s": 0.02,
        "harm_s": 0.0,
    }
    return Estimate(**(values | {"cost_s": ttft_s} | parts), ttft_s=ttft_s, meets=True)


def option(decode: str, ttft_s: float, prefill: str | None = None, **parts: float) -> Option:
    kind = PlanKind.DISAGGREGATED if prefill else PlanKind.LOCAL
    return Option(kind, decode, prefill, 32, estimate(ttft_s, **parts))


def view(worker_id: str) -> WorkerView:
    return WorkerView(worker_id, "127.0.0.1:1", f"life of {worker_id}", PRINT, total_blocks=512, load=0)


def plan(options: Sequence[Option], chosen: int = 0, reason: Reason = Reason.CHEAPEST_PAIR) -> Plan:
    taken = options[chosen]
    prefill = view(taken.prefill) if taken.prefill else None
    return Plan(taken.kind, view(taken.decode), prefill, reason, 16, taken, tuple(options), {})


class Clock:
    """`at` moves by hand."""

    def __init__(self) -> None:
        self.at = 100.0

    def __call__(self) -> float:
        return self.at


def answered(name: str = "mine", key: str = "", options: Sequence[Option] | None = None) -> Record:
    """Planned after 10 ms, a first token after 260 ms, two more 20 and 60 ms later, over after 350 ms."""
    clock = Clock()
    record = Record(name, "a-model", key, Targets(0.3, 0.03), clock)
    clock.at = record.planned_at = record.began_at + 0.01
    candidates = options or [option("decode-0", 0.2, "prefill-0", transfer_s=0.01), option("decode-1", 0.4)]
    record.plan = plan(candidates)
    record.num_prompts = record.num_choices = record.begun = 1
    record.prompt_tokens, record.completion_tokens = 100, 3
    record.first_token_at = record.began_at + 0.26
    record.gaps.add(0.02)
    record.gaps.add(0.06)
    record.gathered = [
        Gathered(
            cached_tokens=16,
            remote_tokens=80,
            remote_cached_tokens=32,
            computed_tokens=4,
            queue_s=0.05,
            transfer_s=0.02,
            transfer_exposed_s=0.012,
            last_block_to_token_s=0.03,
            prefill_s=0.19,
            source_plan="peer 0.190",
        )
    ]
    record.finish_reasons = ["length"]
    clock.at = record.ended_at = record.began_at + 0.35
    return record
