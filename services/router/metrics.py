"""The router's metrics. Label values come from fixed lists, the served model's name and the names of API keys
only."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector
from prometheus_client.samples import Sample

from core import metric_names as names
from core.request import Role
from planning.recovery import Cause, Denial
from services.router.fleet import Fleet
from services.router.standing import WorkerState


class RouterMetrics:
    """A registry of its own, so that several routers (tests) live in one process.

    `fleet` is asked at each scrape; None while the router is loading.
    """

    def __init__(self, fleet: Callable[[], Fleet | None]) -> None:
        self.registry = CollectorRegistry()
        registry, model = self.registry, ("model_name",)

        def counter(name: str, what: str, labels: tuple[str, ...] = ()) -> Counter:
            return Counter(name, what, labels, registry=registry)

        def histogram(name: str, what: str, buckets: Sequence[float]) -> Histogram:
            return Histogram(name, what, model, registry=registry, buckets=buckets)

        self.requests = counter(names.REQUESTS, "HTTP requests answered", ("route", "status"))
        self.in_flight = Gauge(names.REQUESTS_IN_FLIGHT, "requests being answered", registry=registry)
        self.queued = Gauge(names.REQUESTS_QUEUED, "requests that wait for room", registry=registry)
        self.router_queue = Histogram(
            names.ROUTER_QUEUE_SECONDS,
            "seconds that admitted requests waited for room",
            registry=registry,
            buckets=names.TTFT_BUCKETS,
        )
        self.admissions = counter(names.ADMISSIONS, "requests admitted or told no", ("key", "decision"))
        self.key_tokens = counter(names.KEY_TOKENS, "tokens of prompts and answers", ("key",))
        self.plans = counter(names.PLANS, "plans made", ("plan", "reason"))
        self.ttft = histogram(names.TTFT, "seconds from request to first token", names.TTFT_BUCKETS)
        self.itl = histogram(names.ITL, "seconds between tokens of a choice", names.ITL_BUCKETS)
        self.e2e = histogram(names.E2E, "seconds from request to its end", names.TTFT_BUCKETS)
        self.prompt_tokens = counter(names.PROMPT_TOKENS, "prompt tokens of started requests", model)
        self.generation_tokens = counter(names.GENERATION_TOKENS, "tokens generated", model)
        self.finished = counter(names.FINISHED, "choices that finished", ("reason",))
        self.client_gone = counter(names.CLIENT_GONE, "clients that left before their answer's end")
        self.resumes = counter(names.RESUMES, "prompts that went on at another worker", ("reason",))
        self.resumes_denied = counter(names.RESUMES_DENIED, "prompts that could not go on", ("why",))
        for cause in Cause:  # from 0 on: Prometheus sees no increase in a series that begins with 1
            self.resumes.labels(cause.value)
        for why in Denial:
            self.resumes_denied.labels(why.value)
        self.poisoned = counter(names.POISONED, "prompts that were given up since workers ended with them")
        self.faults = counter(names.FAULTS, "answers and streams that failed on our side", ("where",))
        self.slo_requests = counter(
            names.SLO_REQUESTS, "requests judged by their targets; all and met: goodput", ("target", "result")
        )
        self.slo_ratio = Histogram(
            names.SLO_RATIO,
            "measured / target: of the first token's time, of the mean time of each further one",
            ("target",),
            registry=registry,
            buckets=names.SLO_RATIO_BUCKETS,
        )
        self.no_slo_requests = counter(names.NO_SLO_REQUESTS, "requests that had no target")
        self.ttft_error = Histogram(
            names.TTFT_ESTIMATE_ERROR,
            "|predicted - real| / real time from the plan to the first token",
            ("plan",),
            registry=registry,
            buckets=names.ESTIMATE_ERROR_BUCKETS,
        )
        self.ttft_bias = counter(
            names.TTFT_ESTIMATE_BIAS,
            "seconds by which first tokens came sooner (over) or later (under) than predicted",
            ("plan", "direction"),
        )
        self.registry.register(_FleetCollector(fleet))
        self.registry.register(
            _Aliases([self.ttft, self.itl, self.e2e, self.prompt_tokens, self.generation_tokens])
        )

    def count_fault(self, where: str) -> None:
        """Something failed on our side: an answer (`where` is the error's code), a worker's stream."""
        self.faults.labels(where).inc()

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
        counts = fleet.counts() if fleet else {}
        workers = GaugeMetricFamily(names.WORKERS, "workers by state", labels=("role", "state"))
        for role in Role:
            for state in WorkerState:
                workers.add_metric((role.value, state.value), counts.get((role.value, state), 0))
        yield workers
        lost = CounterMetricFamily(names.WORKER_CONNECTIONS_LOST, "connections that broke", labels=("role",))
        for role in Role:
            lost.add_metric((role.value,), fleet.connections_lost[role.value] if fleet else 0)
        yield lost


class _Aliases(Collector):
    """The same samples under vLLM's names."""

    def __init__(self, metrics: Sequence[Counter | Histogram]) -> None:
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
