"""Whether an answer kept its targets, row by row of the table in `judge`."""

from __future__ import annotations

import pytest

from planning.estimate import Targets
from services.router.judge import Course, Ending, Result, Verdict, estimate_error, judge

MET, MISSED, FAILED = Result
BOTH = Targets(ttft_s=1.0, itl_s=0.1)
TTFT, ITL = Targets(ttft_s=1.0), Targets(itl_s=0.1)


@pytest.mark.parametrize(
    ("targets", "course", "verdict"),
    [
        (Targets(), Course(Ending.ANSWERED, 9, 9, 9), Verdict()),
        (Targets(), Course(Ending.FAILED, 9), Verdict()),
        (BOTH, Course(Ending.ANSWERED, 9, 1.0, 0.1), Verdict(MET, MET, MET)),
        (BOTH, Course(Ending.ANSWERED, 9, 1.01, 0.1), Verdict(MISSED, MET, MISSED)),
        (BOTH, Course(Ending.ANSWERED, 9, 1.0, 0.11), Verdict(MET, MISSED, MISSED)),
        (BOTH, Course(Ending.ANSWERED, 9, 1.0), Verdict(MET, MET, MET)),  # one token has no latency
        (TTFT, Course(Ending.ANSWERED, 9, 1.0, 9), Verdict(MET, None, MET)),
        (ITL, Course(Ending.ANSWERED, 9, 9, 0.1), Verdict(None, MET, MET)),
        (ITL, Course(Ending.ANSWERED, 9, 9, 0.2), Verdict(None, MISSED, MISSED)),
        (BOTH, Course(Ending.FAILED, 0.0), Verdict(FAILED, FAILED, FAILED)),  # turned away
        (BOTH, Course(Ending.FAILED, 9, 0.5, 0.05), Verdict(FAILED, FAILED, FAILED)),  # broke off
        (ITL, Course(Ending.FAILED, 0.0), Verdict(None, FAILED, FAILED)),
        (BOTH, Course(Ending.LEFT, 9, 0.5, 0.05), Verdict(MET, MET, MET)),
        (BOTH, Course(Ending.LEFT, 9, 2.0, 0.05), Verdict(MISSED, MET, MISSED)),
        (BOTH, Course(Ending.LEFT, 9, 0.5), Verdict(MET, None, None)),
        (BOTH, Course(Ending.LEFT, 1.1), Verdict(MISSED, None, MISSED)),
        (BOTH, Course(Ending.LEFT, 0.9), Verdict(None, None, None)),
        (BOTH, Course(Ending.REFUSED, 0.0), Verdict()),
    ],
)
def test_the_table(targets, course, verdict):
    assert judge(targets, course) == verdict


@pytest.mark.parametrize(
    ("predicted_s", "real_s", "ratio", "bias_s"),
    [(1.0, 0.8, 0.25, 0.2), (0.6, 0.8, 0.25, -0.2), (0.5, 0.5, 0.0, 0.0)],
)
def test_an_estimate_is_off_by_a_share_of_what_was_real(predicted_s, real_s, ratio, bias_s):
    error = estimate_error(predicted_s, real_s)
    assert error is not None
    assert (error.ratio, error.bias_s) == pytest.approx((ratio, bias_s))


@pytest.mark.parametrize(("predicted_s", "real_s"), [(0.0, 1.0), (1.0, 0.0)])
def test_nothing_predicted_is_not_judged(predicted_s, real_s):
    assert estimate_error(predicted_s, real_s) is None
