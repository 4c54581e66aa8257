"""Time that passes only while somebody looks."""

from __future__ import annotations

import pytest

from core.clock import AwakeClock, FakeClock


def test_a_clock_that_nobody_read_stands_still():
    """1. Read often.  2. Read after an hour.  3. Read often again."""
    inner = FakeClock(100.0)
    clock = AwakeClock(0.5, inner)
    for _ in range(4):
        inner.advance(0.25)
        clock()
    assert clock() == pytest.approx(1.0)
    inner.advance(3600)
    assert clock() == pytest.approx(1.5)
    assert clock() == pytest.approx(1.5)
    inner.advance(0.25)
    assert clock() == pytest.approx(1.75)
