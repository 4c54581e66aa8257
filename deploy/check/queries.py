"""The metrics that manifests name, and the queries they stand in."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

from deploy.check.pods import Document, name_of, of_kind
from deploy.check.render import ROOT

_METRIC = re.compile(r"\b(?:baton_|vllm:)[a-z0-9_]+")
GOLDEN = [ROOT / "tests/data" / name for name in ("router_metrics.txt", "worker_metrics.txt")]


def exported() -> frozenset[str]:
    """What routers and workers export, as the tests of their /metrics hold it."""
    return frozenset(name for path in GOLDEN for name in path.read_text().split())


def metrics_in(query: str, known: frozenset[str]) -> Iterator[tuple[str, bool]]:
    """Each metric that a PromQL expression names, and whether it is exported."""
    for series in _METRIC.findall(query):
        base = re.sub(r"_(bucket|sum|count)$", "", series)
        yield series, series in known or base in known


def queries(documents: Iterable[Document]) -> Iterator[tuple[str, str]]:
    """(which object, PromQL) of scalers and rules; of an autoscaler without PromQL the metrics' names."""
    documents = list(documents)
    for scaler in of_kind(documents, "ScaledObject"):
        for trigger in scaler["spec"]["triggers"]:
            yield f"{name_of(scaler)}, trigger {trigger.get('name')}", trigger["metadata"]["query"]
    for scaler in of_kind(documents, "HorizontalPodAutoscaler"):
        for metric in scaler["spec"]["metrics"]:
            yield name_of(scaler), metric["pods"]["metric"]["name"]
    for rules in of_kind(documents, "PrometheusRule"):
        for group in rules["spec"]["groups"]:
            for rule in group["rules"]:
                yield f"{name_of(rules)}, {rule.get('alert') or rule.get('record')}", rule["expr"]


def recorded(documents: Iterable[Document]) -> frozenset[str]:
    """Names that recording rules make."""
    return frozenset(
        rule["record"]
        for rules in of_kind(documents, "PrometheusRule")
        for group in rules["spec"]["groups"]
        for rule in group["rules"]
        if "record" in rule
    )


def query_problems(documents: Iterable[Document]) -> Iterator[str]:
    documents = list(documents)
    made = recorded(documents)
    known = exported() | made
    for where, query in queries(documents):
        found = list(metrics_in(query, known))
        if not found and not any(name in query for name in made):
            yield f"{where}: its query names no metric of Baton's: {query}"
        for series, there in found:
            if not there:
                yield f"{where}: nobody exports {series}"
