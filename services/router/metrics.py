"""The router's metrics. Label values come from fixed lists and the served model's name only."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector
from prometheus_client.samples import Sample

from core import metric_names as names
from core.request import Role
from services.router.fleet import Fleet
from services.router.roster import WorkerState

ALIASED = (names.TTFT, names.ITL, names.E2E, names.PROMPT_TOKENS, names.GENERATION_TOKENS)
"""Ours that are exported under vLLM's names too; the other aliases are the workers'."""


class RouterMetrics:
    """A registry of its own, so that several routers (tests) live in one process.

    `fleet` is asked at each scrape; None while the router is loading.
    """

    def __init__(self, fleet: Callable[[], Fleet | None]) -> None:
        self.registry = CollectorRegistry()
        own = {"registry": self.registry}
        model = ("model_name",)
        self.requests = Counter(names.REQUESTS, "HTTP requests answered", ("route", "status"), **own)
        self.in_flight = Gauge(names.REQUESTS_IN_FLIGHT, "generation requests now in the router", **own)
        self.plans = Counter(names.PLANS, "plans made", ("plan", "reason"), **own)
        self.ttft = Histogram(
            names.TTFT, "seconds from request to first token", model, buckets=names.TTFT_BUCKETS, **own
        )
        self.itl = Histogram(
            names.ITL, "seconds between tokens of a choice", model, buckets=names.ITL_BUCKETS, **own
        )
        self.e2e = Histogram(
            names.E2E, "seconds from request to its end", model, buckets=names.TTFT_BUCKETS, **own
        )
        self.prompt_tokens = Counter(names.PROMPT_TOKENS, "prompt tokens of started requests", model, **own)
        self.generation_tokens = Counter(names.GENERATION_TOKENS, "tokens generated", model, **own)
        self.finished = Counter(names.FINISHED, "choices that finished", ("reason",), **own)
        self.client_gone = Counter(names.CLIENT_GONE, "clients that left before their answer's end", **own)
        self.faults = Counter(names.FAULTS, "answers that failed on our side", ("where",), **own)
        self.registry.register(_FleetCollector(fleet))
        self.registry.register(
            _Aliases([self.ttft, self.itl, self.e2e, self.prompt_tokens, self.generation_tokens])
        )

    def exposition(self) -> bytes:
        """The Prometheus text format."""
        return generate_latest(self.registry)


class _FleetCollector(Collector):
    def __init__(self, fleet: Callable[[], Fleet | None]) -> None:
        self._fleet = fleet

    def describe(self) -> Iterable[Metric]:
        return []

    def collect(self) -> Iterable[Metric]:
        fleet = self._fleet()
        counts = {(role.value, state.value): 0 for role in Role for state in WorkerState}
        for member, state, _ in fleet.workers() if fleet else ():
            if member.role:
                counts[member.role, state.value] += 1
        workers = GaugeMetricFamily(names.WORKERS, "workers by state", labels=("role", "state"))
        for labels, count in counts.items():
            workers.add_metric(labels, count)
        yield workers
        lost = CounterMetricFamily(names.WORKER_CONNECTIONS_LOST, "connections that broke", labels=("role",))
        for role in Role:
            lost.add_metric((role.value,), fleet.connections_lost[role.value] if fleet else 0)
        yield lost


class _Aliases(Collector):
    """The same samples under vLLM's names."""

    def __init__(self, metrics: list[Counter | Histogram]) -> None:
        self._metrics = metrics

    def describe(self) -> Iterable[Metric]:
        return []

    def collect(self) -> Iterable[Metric]:
        theirs = {ours: alias for alias, ours in names.VLLM_ALIASES.items()}
        for metric in (family for source in self._metrics for family in source.collect()):
            suffix = "_total" if metric.type == "counter" else ""
            alias = theirs[metric.name + suffix].removesuffix(suffix)
            twin = Metric(alias, metric.documentation, metric.type)
            twin.samples = [
                Sample(alias + sample.name.removeprefix(metric.name), *sample[1:])
                for sample in metric.samples
            ]
            yield twin
