"""The scalers' queries, asked of a real Prometheus that scrapes real processes."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path

import pytest
from cluster import Cluster, fresh_salt, only_choice, prompt, wait_until
from prometheus_process import Prometheus, find

from deploy.check.pods import of_kind
from deploy.check.queries import exported, metrics_in, queries
from deploy.check.render import documents

NAMESPACE = {"namespace": "baton"}
"""The label that the Prometheus Operator gives to what it scrapes there."""


def scalers(rendered: dict[str, str]) -> list[tuple[str, str]]:
    objects = [each for overlay in ("keda", "hpa") for each in documents(rendered[overlay])]
    return list(queries(of_kind(objects, "ScaledObject", "HorizontalPodAutoscaler")))


def test_there_are_queries_for_both_pools_and_both_autoscalers(rendered: dict[str, str]):
    found = [where for where, _ in scalers(rendered)]
    assert [where.partition(",")[0] for where in found] == [
        *["ScaledObject/baton-decode"] * 3,
        *["ScaledObject/baton-prefill"] * 2,
        *["HorizontalPodAutoscaler/baton-decode"] * 2,
        "HorizontalPodAutoscaler/baton-prefill",
    ]


def test_every_metric_in_them_is_exported(rendered: dict[str, str]):
    for where, query in scalers(rendered):
        assert all(there for _, there in metrics_in(query, exported())), where


@pytest.mark.parametrize(
    ("query", "found"),
    [
        ("sum(baton_a{role='x'}) / vllm:b", [("baton_a", True), ("vllm:b", False)]),
        ("rate(baton_h_bucket[5m])", [("baton_h_bucket", True)]),
        ("baton_h_total", [("baton_h_total", False)]),
        ("up", []),
    ],
)
def test_metrics_are_found_in_queries(query: str, found: list[tuple[str, bool]]):
    assert list(metrics_in(query, frozenset({"baton_a", "baton_h"}))) == found


@pytest.fixture(scope="module")
def prometheus(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Prometheus, Cluster]]:
    with Cluster(prefill=1, decode=1, transport="shm", ttft_slo_ms=60_000, itl_slo_ms=60_000) as cluster:
        targets = [(f"127.0.0.1:{worker.probe_port}", NAMESPACE, {}) for worker in cluster.workers]
        targets.append((f"127.0.0.1:{cluster.router.port}", NAMESPACE, {}))
        with Prometheus(tmp_path_factory.mktemp("prometheus"), targets) as prometheus:
            yield prometheus, cluster


def numbers(prometheus: Prometheus, query: str) -> list[float]:
    return [float(each["value"][1]) for each in prometheus.query(query)]


@pytest.mark.slow
@pytest.mark.skipif(find() is None, reason="needs a Prometheus: make prometheus")
def test_every_query_gives_a_number(rendered: dict[str, str], prometheus: tuple[Prometheus, Cluster]):
    """1. Nobody has asked for anything: all are numbers already, for KEDA takes an empty answer for an error.
    2. Requests come: the pressures rise above nothing."""
    server, cluster = prometheus
    wait_until(lambda: numbers(server, "count(up == 1)") == [3.0], 30)
    asked = scalers(rendered)
    idle = {query: numbers(server, query) for _, query in asked}
    assert all(found and all(map(math.isfinite, found)) for found in idle.values()), idle
    pressures = [query for query in idle if "baton_slo_ratio" in query]
    assert [idle[query] for query in pressures] == [[0.0], [0.0]]

    def pressed() -> bool:
        only_choice(cluster.complete(prompt("story-128"), max_tokens=4, cache_salt=fresh_salt()))
        return all(numbers(server, query)[0] > 0 for query in pressures)

    wait_until(pressed, 60)
    busy = {query: numbers(server, query) for _, query in asked}
    assert all(found and all(map(math.isfinite, found)) for found in busy.values()), busy
    assert numbers(server, 'sum(baton_prefill_backlog_seconds{role="prefill"})') == [0.0]


@pytest.mark.slow
@pytest.mark.skipif(find() is None, reason="needs a Prometheus: make prometheus")
def test_what_is_no_promql_is_told(prometheus: tuple[Prometheus, Cluster], tmp_path: Path):
    with pytest.raises(ValueError, match="parse error"):
        prometheus[0].query("sum(baton_kv_cache_usage_perc{")
