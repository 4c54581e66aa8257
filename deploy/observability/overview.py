"""Whether all is well, and which pool is short when it is not."""

from __future__ import annotations

from core import metric_names as m
from deploy.observability.panels import Dashboard, Panel, Row
from deploy.observability.queries import percentiles, quantile, rate, series, total
from planning.scaling import BACKLOG_S, PRESSURE

MET, ALL, READY = 'result="met"', 'target="all"', 'state="ready"'

OVERVIEW = Dashboard(
    "baton-overview",
    "Baton: overview",
    "Whether targets are kept, and which pool is short when they are not.",
    [
        Row(
            "Promises",
            [
                Panel(
                    "Requests that kept their targets",
                    "percentunit",
                    "Of those that had one. `ttft` is the prefill pool's, `itl` the decode pool's.",
                    [
                        (
                            "{{target}}",
                            f"{rate(m.SLO_REQUESTS, MET, by='target')} / {rate(m.SLO_REQUESTS, by='target')}",
                        )
                    ],
                ),
                Panel(
                    "Goodput",
                    "reqps",
                    "Requests a second that kept all their targets, beside all that were judged or had none.",
                    [
                        ("kept", rate(m.SLO_REQUESTS, ALL, MET)),
                        ("judged", rate(m.SLO_REQUESTS, ALL)),
                        ("without a target", rate(m.NO_SLO_REQUESTS)),
                    ],
                ),
                Panel(
                    "Pressure: p90 of measured / target",
                    "short",
                    f"What the scalers follow. Over {PRESSURE:g} the pool grows.",
                    [("{{target}}", quantile(0.9, m.SLO_RATIO, by="target"))],
                ),
            ],
        ),
        Row(
            "Latency",
            [
                Panel(
                    "First token (prefill pool)",
                    "s",
                    "From the request to its first token, as clients see it.",
                    percentiles(m.TTFT),
                ),
                Panel(
                    "Between tokens (decode pool)",
                    "s",
                    "Between two tokens of a choice.",
                    percentiles(m.ITL),
                ),
                Panel(
                    "Whole request",
                    "s",
                    "From the request to its end.",
                    percentiles(m.E2E),
                ),
            ],
        ),
        Row(
            "Queues",
            [
                Panel(
                    "Prefill backlog",
                    "s",
                    f"Seconds of prompts still to compute. Over {BACKLOG_S:g} the pool grows.",
                    [("{{worker}}", total(m.PREFILL_BACKLOG, 'role="prefill"', by="worker"))],
                ),
                Panel(
                    "Sequences at decode workers",
                    "short",
                    "Running, waiting for room, waiting for their blocks.",
                    [
                        ("running", total(m.RUNNING, 'role="decode"')),
                        ("waiting", total(m.WAITING, 'role="decode"')),
                        ("loading", total(m.LOADING, 'role="decode"')),
                    ],
                ),
                Panel(
                    "At the router",
                    "short",
                    "Requests in work, and those of them that wait to be let in.",
                    [("in work", total(m.REQUESTS_IN_FLIGHT)), ("waiting", total(m.REQUESTS_QUEUED))],
                ),
                Panel(
                    "Waited at a worker, p90",
                    "s",
                    "Until a request's first step, by pool.",
                    [("{{role}}", quantile(0.9, m.QUEUE_SECONDS, by="role"))],
                ),
                Panel(
                    "Waited at the router",
                    "s",
                    "Of requests that were let in.",
                    percentiles(m.ROUTER_QUEUE_SECONDS),
                ),
                Panel(
                    "First step to first token, p90",
                    "s",
                    "By pool.",
                    [("{{role}}", quantile(0.9, m.PREFILL_SECONDS, by="role"))],
                ),
            ],
        ),
        Row(
            "Workers",
            [
                Panel(
                    "Ready",
                    "short",
                    "Workers that take requests.",
                    [("{{role}}", f"max by (role) ({series(m.WORKERS, READY)})")],
                    stat=True,
                ),
                Panel(
                    "Workers by state",
                    "short",
                    "As the routers see them: the largest number that any of them has.",
                    [("{{role}} {{state}}", f"max by (role, state) ({series(m.WORKERS)})")],
                ),
                Panel(
                    "Connections lost",
                    "short",
                    "Between routers and workers, each minute.",
                    [("{{role}}", f"60 * {rate(m.WORKER_CONNECTIONS_LOST, by='role')}")],
                ),
                Panel(
                    "Requests that went on elsewhere",
                    "short",
                    "Each minute, by what happened to their worker; clients saw none of these.",
                    [("{{reason}}", f"60 * {rate(m.RESUMES, by='reason')}")],
                ),
                Panel(
                    "Requests that could not go on",
                    "short",
                    "Each minute, by why not; their clients got an error.",
                    [
                        ("{{why}}", f"60 * {rate(m.RESUMES_DENIED, by='why')}"),
                        ("poisoned", f"60 * {rate(m.POISONED)}"),
                    ],
                ),
                Panel(
                    "Faults",
                    "short",
                    "On our side, each minute, by place.",
                    [("{{where}}", f"60 * {rate(m.FAULTS, by='where')}")],
                ),
            ],
        ),
    ],
)
