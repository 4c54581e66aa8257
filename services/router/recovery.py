"""What the router does about a part whose try was lost: judge it, then look for another worker.

`planning.recovery` decides; here it is asked, counted, logged and told to the client.
"""

from __future__ import annotations

from dataclasses import dataclass

from core import log
from core.errors import BatonError, RequestPoisoned
from planning.recovery import DOUBT_S, Cause, Denial, Resume, after, denial, is_suspect, is_worth_waiting
from services.router.part import Part
from services.router.router import Router
from services.router.session import Lost

logger = log.get("router.recovery")


@dataclass(frozen=True, slots=True)
class Stranded:
    """A part that nobody works on. `since`, `until`: when it was lost, and how long it looks for a worker, on
    the router's clock."""

    part: Part
    error: BatonError
    cause: Cause
    since: float
    until: float


def stranded(router: Router, part: Part, lost: Lost, now: float) -> Stranded:
    """What is to go on elsewhere. Raises what ends the request: `lost.error`, or RequestPoisoned."""
    if lost.cause is None:
        raise lost.error
    incarnation = part.plan.decode.incarnation
    part.session = None
    part.tries = after(part.tries, incarnation, lost.cause, part.num_tokens - part.num_before, now)
    why_not = denial(part.tries, router.settings.max_resumes)
    # The first is its own, see planning.retry_budget.
    if why_not is None and part.tries.resumes > 1 and not router.retries.spend(now):
        why_not = Denial.BUDGET
    if why_not is not None:
        raise denied(router, part, lost.error, why_not)
    return Stranded(part, lost.error, lost.cause, now, now + router.settings.resume_timeout_s)


def may_go_on(router: Router, each: Stranded, now: float) -> bool:
    """Whether a part may be sent to another worker; False as long as two that seem to have ended with it may
    yet show a sign of life. Raises RequestPoisoned."""
    _, fleet = router.serving()
    tries = each.part.tries
    alive = {life for life in tries.ended - tries.avoided(now) if fleet.works(life)}
    if not is_suspect(tries, alive):
        return True
    if now < min(each.since + DOUBT_S, each.until):
        return False
    raise denied(router, each.part, each.error, Denial.POISONED)


def may_wait(router: Router, each: Stranded, now: float) -> bool:
    """Whether a part for which no worker was ready goes on looking."""
    if now >= each.until:
        return False
    _, fleet = router.serving()
    return is_worth_waiting(each.cause, bool(each.part.num_tokens), fleet.expects_decode())


def denied(router: Router, part: Part, error: BatonError, why: Denial) -> BatonError:
    """The error for a part that does not go on, which is counted."""
    router.metrics.resumes_denied.labels(why.value).inc()
    logger.warning("request.given_up", request_id=part.name, why=why.value, tries=part.tries.resumes)
    if why is not Denial.POISONED:
        return error
    router.metrics.poisoned.inc()
    return RequestPoisoned(
        "two decode workers failed while they ran this request, so it is not tried on a third; "
        "send it again only if both are known to have failed for another reason"
    )


def resumed(router: Router, each: Stranded, lost_worker: str) -> Resume:
    """It goes on, with the plan that it has now: count and log it."""
    part = each.part
    resume = Resume(each.cause, lost_worker, part.plan.decode.worker_id, part.num_tokens)
    router.metrics.resumes.labels(each.cause.value).inc()
    logger.warning(
        "request.resumed",
        request_id=part.name,
        reason=each.cause.value,
        lost_worker=resume.lost_worker,
        worker=resume.worker,
        tokens=resume.num_tokens,
    )
    return resume
