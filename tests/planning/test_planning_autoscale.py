"""The scaling policy in the loop: replayed against pools that take time to grow."""

from __future__ import annotations

import os
from statistics import fmean

import pytest

from benchmarks.autoscale import CODE, CONV, SHARED, baton, most_in_ten_minutes, static, trace
from benchmarks.autoscale_sim import Asked, Replay


def a_busy_spell() -> list[Asked]:
    """20 minutes of little, 20 of six times as much, and 100 of little."""
    asked, now = [], 0.0
    while now < 8400:
        now += 0.25 if 1200 <= now < 2400 else 1.5
        asked.append(Asked(now, 1500, 60))
    return asked


def replayed(asked: list[Asked], sizes: tuple[int, int], policy: str) -> Replay:
    replay = Replay(asked, sizes, baton() if policy == "baton" else static)
    replay.run()
    return replay


def test_it_follows_the_load_for_less_than_its_crest_costs():
    small, large, ours = a_busy_spell(), a_busy_spell(), a_busy_spell()
    replayed(small, (1, 2), "static")
    crest = replayed(large, (4, 2), "static")
    followed = replayed(ours, (1, 2), "baton")
    kept = [fmean(each.kept for each in asked) for asked in (small, large, ours)]
    assert kept[0] < 0.5
    assert kept[1] > 0.99
    assert kept[2] > 0.9
    assert followed.prefill.node_s < crest.prefill.node_s
    grew = [up for _, up in followed.prefill.directions]
    assert grew == sorted(grew, reverse=True), "it grew, then it shrank"
    assert followed.prefill.size == 1
    assert followed.decode.directions == []


@pytest.mark.slow
@pytest.mark.skipif(SHARED not in os.environ, reason=f"needs public traces: {SHARED}")
@pytest.mark.parametrize("name", [CODE, CONV])
def test_public_traces_see_at_most_one_reversal_in_ten_minutes(name: str):
    asked = trace(name, 3600)
    replay = replayed(asked, (2, 2), "baton")
    assert fmean(each.kept for each in asked) > 0.75
    assert most_in_ten_minutes(replay.prefill) <= 1
    assert most_in_ten_minutes(replay.decode) <= 1
