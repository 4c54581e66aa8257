"""What a PromQL expression refers to, and what routers and workers really export, with its labels."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from types import SimpleNamespace
from typing import Any, cast

import promql_parser as promql
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from core.request import Gathered
from engine.loop import EngineLoop
from engine.messages import EngineStats
from kvtransfer.tier import TierStats
from kvtransfer.tier_stack import TierStack
from services.router.metrics import RouterMetrics
from services.worker.hub import Hub
from services.worker.metrics import WorkerMetrics

Exported = Mapping[str, frozenset[str]]
"""Name of a series -> its labels."""

SCRAPE_LABELS = frozenset({"namespace", "pod", "job", "instance"})
"""What Prometheus adds to every series that it scrapes in a cluster."""


def exported() -> Exported:
    """Every series of a router and of a worker once all that is counted has happened."""
    router = RouterMetrics(lambda: None)
    for metric in vars(router).values():
        if names := getattr(metric, "_labelnames", ()):
            metric.labels(*("x" for _ in names))
    router_text = generate_latest(router.registry).decode()
    found = {"baton_workers": frozenset({"role", "state"})} | dict(_series(router_text))
    found["baton_worker_connections_lost_total"] = frozenset({"role"})
    return found | dict(_series(generate_latest(_worker()).decode()))


def _worker() -> CollectorRegistry:
    loop = cast(EngineLoop, SimpleNamespace(stats=EngineStats()))
    stack = cast(TierStack, SimpleNamespace(stats=lambda: {"disk": TierStats(breaker="closed")}))
    hub = cast(Hub, SimpleNamespace(num_faults=0))
    metrics = WorkerMetrics(loop, lambda: 0.0, stack, hub, "decode", "decode-0", "m")
    metrics.gathered(Gathered())
    metrics.transferred(1, 1.0)
    metrics.transfer_failed("x")
    metrics.loaded("x")
    return metrics.registry


def _series(text: str) -> Iterator[tuple[str, frozenset[str]]]:
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            yield sample.name, frozenset(sample.labels)


def problems(query: str, known: Exported) -> list[str]:
    """Metrics that nobody exports, and labels that they do not have. Raises ValueError for what is no PromQL."""
    found: list[str] = []
    inside: list[frozenset[str]] = []
    tree = promql.parse(query)

    def selector(node: promql.VectorSelector) -> None:
        labels = known.get(node.name or "")
        if labels is None:
            found.append(f"nobody exports {node.name}")
            return
        inside.append(labels)
        wanted = [matcher.name for matcher in node.matchers.matchers]
        found.extend(
            f"{node.name} has no label {name}" for name in wanted if name not in labels | SCRAPE_LABELS
        )

    def visit(node: Any) -> None:
        match node:
            case promql.VectorSelector():
                selector(node)
            case promql.MatrixSelector():
                selector(node.vector_selector)

    promql.walk(tree, visit)
    there = SCRAPE_LABELS.union(*inside)
    return found + [f"{label} is no label of what it groups" for label in grouped(tree) if label not in there]


def grouped(tree: promql.Expr) -> list[str]:
    """The labels that an expression groups or matches by."""
    found: list[str] = []

    def visit(node: Any) -> None:
        match node:
            case promql.AggregateExpr() if node.modifier:
                found.extend(node.modifier.labels)
            case promql.BinaryExpr() if node.modifier and node.modifier.matching:
                found.extend(node.modifier.matching.labels)

    promql.walk(tree, visit)
    return found
