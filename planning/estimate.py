"""What serving a request would take on one pair of workers: the values that a plan explains itself by."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from core.request import PlanKind


@dataclass(frozen=True, slots=True)
class Targets:
    """What a client wants: the first token within `ttft_s`, each further one within `itl_s`; 0 = none."""

    ttft_s: float = 0.0
    itl_s: float = 0.0


class Estimate(NamedTuple):
    """Seconds. `ttft_s` is the sum of the first four.

    `wait_s`: for work that was there before. `prefill_s`: computing what nobody holds. `transfer_s`: of the
    handoff, as far as computing does not hide it. `load_s`: from tiers. `itl_s`: a step of the decode
    worker with this request in it. `harm_s`: by which the streams that decode there are held up, all
    together. `cost_s`: what pairs are compared by. `meets`: the targets, both.
    """

    wait_s: float
    prefill_s: float
    transfer_s: float
    load_s: float
    ttft_s: float
    itl_s: float
    harm_s: float
    cost_s: float
    meets: bool


class Option(NamedTuple):
    """One pair that was looked at; `decode` and `prefill` are worker ids. `cached_tokens`: of the prompt,
    that nobody would have to compute."""

    kind: PlanKind
    decode: str
    prefill: str | None
    cached_tokens: int
    estimate: Estimate
