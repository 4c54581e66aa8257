"""What a request does whose try on a decode worker ended early: go on elsewhere, or end. Pure.

    a try ends ---> after(tries, ...) ---> denial(tries, ...) ---> None: go on with all tokens so far
                                                            `---> why it ends

Only a worker that ended, or whose step raised, under a request speaks against it, and only as long as the
request has not got on since: PROGRESS_TOKENS new tokens on one worker take it all back, and a life that
turns out to go on (its connection was cut, or it was only stopped) does not count. Two such workers make
the request poisoned; where they only seem to have ended, DOUBT_S passes first. One that refuses, drains or
is full says nothing about it. Requests that stand beside a poisoned one on both workers, and get on too
little on the second, cannot be told from it; every other one is spared.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from math import inf

from core.errors import BatonError, EngineFault, Overloaded, Unavailable, WorkerLost

MAX_DEATHS = 2
"""Workers' lives that a request may end, as far as anybody knows; then it is poisoned."""

PROGRESS_TOKENS = 16
"""A request that gets so many tokens on one worker is not what ended the worker before."""

AVOID_S = 1.0
"""How long a worker that lost or refused a request is not asked again by it: until then its State has
come, or its connection has ended."""

DOUBT_S = 3.0
"""How long a request waits for a sign of life of workers that seem to have ended with it: after a cut, the
router is connected again within a second or so."""


class Cause(StrEnum):
    """Why a try ended without its answer: a metric label."""

    DIED = "worker_died"  # or was cut off
    SILENT = "worker_silent"  # no State, or no step, for too long
    LEFT = "worker_left"  # it ended the stream in good order
    FAULT = "engine_fault"  # a step with the request in it raised; the worker lives on
    UNAVAILABLE = "unavailable"  # it takes nothing up, as while it drains
    BUSY = "overloaded"


class Denial(StrEnum):
    """Why a request does not go on elsewhere: a metric label."""

    POISONED = "poisoned"
    LIMIT = "limit"  # of this request
    BUDGET = "budget"  # of all together
    NO_WORKER = "no_worker"


@dataclass(frozen=True, slots=True)
class Resume:
    """Once that a request went on elsewhere: from which worker to which, after how many tokens."""

    cause: Cause
    lost_worker: str
    worker: str
    num_tokens: int


@dataclass(frozen=True, slots=True)
class Tries:
    """Where a request has been. `resumes`: tries that ended. `ended`, `faulty`: workers (incarnations) that
    ended, or whose step raised, with it and since which it has not got on. `avoid`: until when it is not sent
    there."""

    resumes: int = 0
    ended: frozenset[str] = frozenset()
    faulty: frozenset[str] = frozenset()
    avoid: Mapping[str, float] = field(default_factory=dict)

    def avoided(self, now: float) -> frozenset[str]:
        """Incarnations that are not to be asked at `now`."""
        return frozenset(each for each, until in self.avoid.items() if until > now)


def cause_of(error: BatonError) -> Cause | None:
    """Why a worker failed a request; None where trying elsewhere would not help."""
    match error:
        case WorkerLost():
            return Cause.DIED
        case EngineFault():
            return Cause.FAULT
        case Unavailable():
            return Cause.UNAVAILABLE
        case Overloaded():
            return Cause.BUSY
    return None


def after(tries: Tries, incarnation: str, cause: Cause, new_tokens: int, now: float) -> Tries:
    """The tries once one ended on this worker, which had brought `new_tokens`."""
    before = tries if new_tokens < PROGRESS_TOKENS else Tries()
    here = frozenset({incarnation})
    return Tries(
        tries.resumes + 1,
        before.ended | here if cause in (Cause.DIED, Cause.SILENT) else before.ended,
        before.faulty | here if cause is Cause.FAULT else before.faulty,
        {**tries.avoid, incarnation: inf if cause is Cause.FAULT else now + AVOID_S},
    )


def denial(tries: Tries, max_resumes: int) -> Denial | None:
    """Why a request with these tries does not go on, whatever becomes of the workers that ended."""
    if len(tries.faulty) >= MAX_DEATHS:
        return Denial.POISONED
    return Denial.LIMIT if tries.resumes > max_resumes else None


def is_suspect(tries: Tries, alive: Collection[str]) -> bool:
    """Whether enough workers ended with it, or raised. `alive`: of those that ended, the ones that go on."""
    return len(tries.faulty | tries.ended.difference(alive)) >= MAX_DEATHS


def is_worth_waiting(cause: Cause, has_tokens: bool, others_expected: bool) -> bool:
    """Whether a request waits for a worker where none is ready now. `others_expected`: decode workers are
    known that are not ready and may come back."""
    if cause in (Cause.DIED, Cause.SILENT, Cause.LEFT):
        return True  # what took its place is expected
    if cause is Cause.FAULT:
        return others_expected
    return has_tokens or (others_expected and cause is Cause.UNAVAILABLE)
