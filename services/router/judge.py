"""Did an answer keep its targets, and was its plan's estimate right: pure functions, one request at a time.

The inter-token latency that is judged is the request's mean, (last - first token) / (tokens - 1) over all
choices, as DistServe (arXiv:2401.09670) and vLLM's benchmark judge their TPOT; one token has no latency and
keeps any target. The same sources count as good only what keeps every target it has: goodput is the rate of
those, attainment their share.

    ended      first token   the target of TTFT                     the target of ITL
    answered   came          met or missed                          met or missed
    failed     or not        failed: a 429 or 5xx is no answer      failed
    left       came          met or missed                          by its tokens, if two came
    left       did not       missed if it was over, else not judged not judged
    refused    never         not judged: the client has to change the request (4xx)
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from planning.estimate import Targets


class Ending(StrEnum):
    ANSWERED = "answered"
    FAILED = "failed"
    LEFT = "left"
    REFUSED = "refused"


class Result(StrEnum):
    """A metric label."""

    MET = "met"
    MISSED = "missed"
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class Course:
    """Seconds since the request came. `ttft_s` None: no token came. `itl_s`: the mean, None with fewer than
    two tokens of any choice."""

    ending: Ending
    elapsed_s: float
    ttft_s: float | None = None
    itl_s: float | None = None


@dataclass(frozen=True, slots=True)
class Verdict:
    """None: no such target, or not judged. `all`: of every target that the request has."""

    ttft: Result | None = None
    itl: Result | None = None
    all: Result | None = None


@dataclass(frozen=True, slots=True)
class EstimateError:
    """`ratio`: |predicted - real| / real. `bias_s`: predicted - real; above 0 it came sooner than
    predicted."""

    ratio: float
    bias_s: float


def judge(targets: Targets, course: Course) -> Verdict:
    """What an ended request means for its targets."""
    wanted = [target for target in (targets.ttft_s, targets.itl_s) if target]
    if not wanted or course.ending is Ending.REFUSED:
        return Verdict()
    ttft = _judge_ttft(targets.ttft_s, course) if targets.ttft_s else None
    itl = _judge_itl(targets.itl_s, course) if targets.itl_s else None
    results = [result for result in (ttft, itl) if result is not None]
    for worst in (Result.FAILED, Result.MISSED):
        if worst in results:
            return Verdict(ttft, itl, worst)
    return Verdict(ttft, itl, Result.MET if len(results) == len(wanted) else None)


def _judge_ttft(target_s: float, course: Course) -> Result | None:
    if course.ending is Ending.FAILED:
        return Result.FAILED
    if course.ttft_s is not None:
        return Result.MET if course.ttft_s <= target_s else Result.MISSED
    return Result.MISSED if course.elapsed_s > target_s else None


def _judge_itl(target_s: float, course: Course) -> Result | None:
    if course.ending is Ending.FAILED:
        return Result.FAILED
    if course.itl_s is not None:
        return Result.MET if course.itl_s <= target_s else Result.MISSED
    return Result.MET if course.ending is Ending.ANSWERED else None


def estimate_error(predicted_s: float, real_s: float) -> EstimateError | None:
    """None where nothing was predicted or nothing came."""
    if predicted_s <= 0 or real_s <= 0:
        return None
    return EstimateError(abs(predicted_s - real_s) / real_s, predicted_s - real_s)
