"""A worker's metrics: the engine's counters read at each scrape, histograms fed by the services."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from core import metric_names as names
from core.request import Gathered
from engine.loop import EngineLoop
from kvtransfer.tier_stack import TierStack
from services.worker.hub import Hub

_ALIASES: dict[str, list[str]] = {}
for _alias, _ours in names.VLLM_ALIASES.items():
    _ALIASES.setdefault(_ours, []).append(_alias)


class _Engine(Collector):
    """Gauges and counters of the engine, as they stand when asked."""

    def __init__(
        self, loop: EngineLoop, prompt_token_s: Callable[[], float], hub: Hub, labels: dict[str, str]
    ) -> None:
        self._loop, self._prompt_token_s, self._hub, self._labels = loop, prompt_token_s, hub, labels

    def collect(self) -> Iterator[Metric]:
        s = self._loop.stats
        used = s.total_blocks - s.free_blocks
        gauges = {
            names.RUNNING: (s.running, "sequences running"),
            names.WAITING: (s.waiting, "requests waiting"),
            names.LOADING: (s.loading, "requests whose blocks are arriving"),
            names.HELD: (s.held, "prefill jobs leased to a peer"),
            names.PREFILL_BACKLOG: (
                s.queued_tokens * self._prompt_token_s(),
                "seconds in which the prompt tokens that are still to compute here are computed",
            ),
            names.BLOCKS_TOTAL: (s.total_blocks, "blocks of the KV pool"),
            names.BLOCKS_FREE: (s.free_blocks, "unreferenced blocks, cached ones included"),
            names.BLOCKS_CACHED: (s.cached_blocks, "unreferenced blocks that can be hit"),
            names.BLOCKS_QUARANTINED: (s.quarantined_blocks, "blocks that a late read may still write into"),
            names.KV_USAGE: (
                used / s.total_blocks if s.total_blocks else 0.0,
                "share of blocks in use, 0-1",
            ),
        }
        counters = {
            names.STEPS: (s.steps, "engine steps"),
            names.PREEMPTIONS: (s.preemptions, "sequences preempted for want of blocks"),
            names.BLOCKS_EVICTED: (s.evicted_blocks, "cached blocks given up for new content"),
            names.PREFIX_QUERIES: (s.prefix_queries, "tokens looked up in the prefix cache"),
            names.PREFIX_HITS: (s.prefix_hits, "tokens found in the prefix cache"),
        }
        for name, (value, text) in gauges.items():
            yield from self._families(GaugeMetricFamily, name, value, text)
        for name, (value, text) in counters.items():
            yield from self._families(CounterMetricFamily, name, value, text)
        faults = CounterMetricFamily(names.FAULTS, "faults by place", labels=[*self._labels, "where"])
        faults.add_metric([*self._labels.values(), "engine_step"], s.step_failures)
        faults.add_metric([*self._labels.values(), "hash_mismatch"], s.hash_mismatches)
        faults.add_metric([*self._labels.values(), "event_handler"], self._hub.num_faults)
        yield faults

    def _families(
        self,
        kind: type[GaugeMetricFamily] | type[CounterMetricFamily],
        name: str,
        value: float,
        text: str,
    ) -> Iterator[Metric]:
        for exported in (name, *_ALIASES.get(name, ())):
            family = kind(exported, text, labels=list(self._labels))
            family.add_metric(list(self._labels.values()), value)
            yield family


class _Tiers(Collector):
    """What the tiers count, as it stands when asked."""

    _COUNTERS = (
        (names.TIER_QUERIES, "queries", "blocks looked up"),
        (names.TIER_HITS, "hits", "blocks looked up and held"),
        (names.TIER_LOAD_BYTES, "load_nbytes", "bytes loaded"),
        (names.TIER_LOAD_SECONDS, "load_s", "time spent loading"),
        (names.TIER_STORE_BYTES, "store_nbytes", "bytes stored"),
        (names.TIER_STORE_SECONDS, "store_s", "time spent storing"),
        (names.TIER_EVICTED, "evictions", "blocks given up for others"),
        (names.TIER_CORRUPT, "corrupt", "blocks that failed verification"),
        (names.TIER_DROPPED, "dropped", "stores given up"),
        (names.TIER_ERRORS, "errors", "operations that failed or took too long"),
    )
    _GAUGES = (
        (names.TIER_USED_BYTES, "used_nbytes", "bytes held"),
        (names.TIER_CAPACITY_BYTES, "capacity_nbytes", "bytes that may be held; 0 = no cap of its own"),
    )
    _BREAKER = {"open": 1.0, "half-open": 0.5}

    def __init__(self, stack: TierStack, labels: dict[str, str]) -> None:
        self._stack, self._labels = stack, labels

    def collect(self) -> Iterator[Metric]:
        stats = self._stack.stats()
        for kind, listed in ((CounterMetricFamily, self._COUNTERS), (GaugeMetricFamily, self._GAUGES)):
            for name, field, text in listed:
                yield self._family(kind, name, text, {t: getattr(s, field) for t, s in stats.items()})
        breakers = {tier: self._BREAKER.get(s.breaker, 0.0) for tier, s in stats.items() if s.breaker}
        text = "whether the tier is left alone after faults"
        yield self._family(GaugeMetricFamily, names.TIER_BREAKER_OPEN, text, breakers)

    def _family(
        self,
        kind: type[GaugeMetricFamily] | type[CounterMetricFamily],
        name: str,
        text: str,
        values: dict[str, float],
    ) -> Metric:
        family = kind(name, text, labels=[*self._labels, "tier"])
        for tier, value in values.items():
            family.add_metric([*self._labels.values(), tier], value)
        return family


class WorkerMetrics:
    """One worker's registry; every series carries role, worker and model_name.

    `prompt_token_s`: seconds in which a prompt token is computed here, as measured by now.
    """

    def __init__(
        self,
        loop: EngineLoop,
        prompt_token_s: Callable[[], float],
        stack: TierStack | None,
        hub: Hub,
        role: str,
        worker_id: str,
        model_name: str,
    ) -> None:
        self.registry = CollectorRegistry()
        self._labels = {"role": role, "worker": worker_id, "model_name": model_name}
        self.registry.register(_Engine(loop, prompt_token_s, hub, self._labels))
        if stack:
            self.registry.register(_Tiers(stack, self._labels))
        self._tokens = self._counter(names.TOKENS_BY_SOURCE, "prompt tokens by source of their KV", "source")
        self._queue = self._histogram(names.QUEUE_SECONDS, "time a request waited", names.TTFT_BUCKETS)
        self._prefill = self._histogram(
            names.PREFILL_SECONDS, "from the first step to the first token", names.TTFT_BUCKETS
        )
        self._transfer = self._histogram(
            names.TRANSFER_SECONDS, "reading a request's blocks from a peer", names.TTFT_BUCKETS
        )
        self._transfer_bytes = self._counter(names.TRANSFER_BYTES, "bytes read from peers")
        self._transfer_failures = self._counter(
            names.TRANSFER_FAILURES, "loads that did not deliver", "reason"
        )
        self._loads = self._counter(names.LOADS, "loads by the sources chosen", "sources")
        self._leases_expired = self._counter(names.LEASES_EXPIRED, "leases that ended without a sign of life")
        self._refused = self._counter(names.CALLS_REFUSED, "calls of peers without the cluster token")
        self._unannounced = self._counter(names.ANNOUNCEMENTS_FAILED, "announcements that nobody took")
        self._begin_at_zero()

    def advertised(self, role: str) -> None:
        """The label of what is counted and shown from now on; what was counted before keeps its own."""
        self._labels["role"] = role
        self._begin_at_zero()

    def gathered(self, value: Gathered) -> None:
        """Count one request's prompt, once its first token is out."""
        for source, tokens in (
            ("device", value.cached_tokens),
            *value.tier_tokens,
            ("prefill_worker", value.remote_tokens),
            ("computed", value.computed_tokens),
        ):
            for counter in self._tokens:
                counter.labels(*self._labels.values(), source).inc(tokens)
        for histogram in self._queue:
            histogram.labels(*self._labels.values()).observe(value.queue_s)
        for histogram in self._prefill:
            histogram.labels(*self._labels.values()).observe(value.prefill_s)

    def transferred(self, nbytes: int, seconds: float) -> None:
        for counter in self._transfer_bytes:
            counter.labels(*self._labels.values()).inc(nbytes)
        for histogram in self._transfer:
            histogram.labels(*self._labels.values()).observe(seconds)

    def transfer_failed(self, reason: str) -> None:
        for counter in self._transfer_failures:
            counter.labels(*self._labels.values(), reason).inc()

    def loaded(self, label: str) -> None:
        """Count a load by the sources that were chosen for it."""
        for counter in self._loads:
            counter.labels(*self._labels.values(), label or "none").inc()

    def call_refused(self) -> None:
        for counter in self._refused:
            counter.labels(*self._labels.values()).inc()

    def announcement_failed(self) -> None:
        for counter in self._unannounced:
            counter.labels(*self._labels.values()).inc()

    def lease_expired(self) -> None:
        for counter in self._leases_expired:
            counter.labels(*self._labels.values()).inc()

    def _begin_at_zero(self) -> None:
        """Prometheus sees no increase in a series whose first value is 1."""
        for counter in (*self._leases_expired, *self._refused, *self._unannounced):
            counter.labels(*self._labels.values())

    def _counter(self, name: str, text: str, *labels: str) -> list[Counter]:
        exported = (name, *_ALIASES.get(name, ()))
        return [Counter(n, text, [*self._labels, *labels], registry=self.registry) for n in exported]

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...]) -> list[Histogram]:
        exported = (name, *_ALIASES.get(name, ()))
        return [
            Histogram(n, text, list(self._labels), buckets=buckets, registry=self.registry) for n in exported
        ]
