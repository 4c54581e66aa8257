"""The planner behind a router's roster, in a fleet that is simulated (`benchmarks.routing`)."""

from __future__ import annotations

import os
import random
from statistics import fmean

import pytest

from benchmarks import routing
from core.request import Role


@pytest.mark.parametrize("num_routers", [1, 2])
@pytest.mark.parametrize("gap_s", [0.002, 5.0], ids=["burst", "one-by-one"])
@pytest.mark.parametrize("roles", [routing.AGGREGATED, routing.SPLIT], ids=["aggregated", "split"])
def test_no_worker_gets_more_than_twice_the_mean_where_all_share_a_prefix(roles, gap_s, num_routers):
    asked = routing.alike(200, gap_s)
    routing.simulate(asked, roles, None, num_routers)
    assert all(each.ttft_s > 0 for each in asked)
    served, most = routing.share(asked, Role.DECODE, roles[Role.DECODE])
    assert served == 200
    assert most <= 2
    served, most = routing.share(asked, Role.PREFILL, roles.get(Role.PREFILL, 1))
    assert most <= 2 or served < 10, "a few that build the prefix for the others"
    if gap_s > 1:
        assert routing.hit_rate(asked) > 0.7


@pytest.mark.slow
@pytest.mark.skipif(routing.SHARED not in os.environ, reason=f"{routing.SHARED} names no folder with traces")
@pytest.mark.parametrize("roles", [routing.AGGREGATED, routing.SPLIT], ids=["aggregated", "split"])
def test_the_planner_beats_the_other_ways_on_a_public_trace(roles):
    times = {}
    for name, way in routing.WAYS.items():
        asked = routing.trace(3000, 0.8, roles.get(Role.PREFILL, roles[Role.DECODE]), random.Random(0))
        routing.simulate(asked, roles, way)
        times[name] = fmean(each.ttft_s for each in asked)
    assert times["random"] > times["load"] > times["prefix"] >= times["cost"]
