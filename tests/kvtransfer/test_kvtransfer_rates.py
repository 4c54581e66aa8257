import pytest

from core.clock import FakeClock
from kvtransfer.rates import FORGET_AFTER_S, Rate, RateMeter


def test_rate_tells_latency_from_bandwidth():
    meter = RateMeter(Rate(0.001, 1e9), FakeClock(100.0))
    for nbytes in (10**6, 10**7, 10**8) * 3:
        meter.add(nbytes, 0.005 + nbytes / 2e8)
    rate = meter.rate(queued_nbytes=10**7)
    assert rate.measured
    assert rate.latency_s == pytest.approx(0.005, rel=1e-3)
    assert rate.nbytes_per_s == pytest.approx(2e8, rel=1e-3)
    assert rate.queued_nbytes == 10**7


def test_rate_follows_a_tier_that_became_slow():
    meter = RateMeter(Rate(0.001, 1e9), FakeClock(100.0))
    for _ in range(20):
        meter.add(10**7, 0.01)
    for _ in range(6):
        meter.add(10**7, 0.1)
    assert meter.rate().nbytes_per_s < 1.5e8


def test_rate_is_forgotten_so_that_a_slow_tier_gets_another_try():
    clock, guess = FakeClock(100.0), Rate(0.001, 1e9)
    meter = RateMeter(guess, clock)
    assert meter.rate() == guess
    meter.add(10**6, 1.0)
    assert meter.rate().nbytes_per_s == pytest.approx(1e6)
    clock.advance(FORGET_AFTER_S + 1)
    assert meter.rate() == guess
    meter.add(10**6, 0.01)
    assert meter.rate().nbytes_per_s == pytest.approx(1e8)
