"""`baton explain [REQUEST_ID]`: why a router planned a request as it did, and what it then really took.

Asks `/v1/requests` of a router that runs. Exit status 0; 1 when it cannot be asked or knows no such request.
"""

from __future__ import annotations

import sys
import time
import urllib.parse
from collections.abc import Iterable

from pydantic import TypeAdapter, ValidationError
from rich.console import Console
from rich.table import Table

from core.errors import RequestError, Unavailable
from core.settings import Settings
from planning.plan import Reason
from services.ask import ask, local_url
from services.router.record_json import Candidate, PlanRecord, RequestRecord
from services.router.record_summary import RequestList, RequestSummary

WIDTH = 160
"""Where no terminal says how wide it is."""

WHY = {
    Reason.CHEAPEST_PAIR: "it was the cheapest of all plans that were looked at",
    Reason.CHEAPEST_LOCAL: "it was the cheapest of all plans that were looked at",
    Reason.SHORT_PROMPT: "its prompt has fewer full blocks than --min-remote-tokens asks for",
    Reason.PREFIX_ON_DECODE: "the decode worker holds so much of its prompt that a handoff is not worth it",
    Reason.PREFILL_BUSY: "the prefill workers had too much to do already",
    Reason.SLOW_TRANSFER: "the handoff would have taken too long",
    Reason.KEEPS_TARGETS: "it was the cheapest plan that meets the targets; a cheaper one does not",
    Reason.MISSES_TARGETS: "no plan meets the targets, and this one misses them by the least",
    Reason.FORCED_LOCAL: "the client asked for it with X-Baton-Plan: local",
    Reason.FORCED_DISAGGREGATED: "the client asked for it with X-Baton-Plan: disaggregated",
    Reason.NO_PREFILL_WORKER: "no prefill worker was ready",
    Reason.NO_COMPATIBLE_PREFILL: "no prefill worker had the decode worker's fingerprint",
    Reason.PROMPT_EXCEEDS_PREFILL_POOL: "its prompt exceeds the pool of every prefill worker",
    Reason.NEEDS_PROMPT_LOGPROBS: "it wants every logit of its prompt, which only a decode worker computes",
}


def run(settings: Settings, request_id: str | None, router: str, as_json: bool) -> int:
    """Explain one request, or without `request_id` list the newest; returns the exit status.

    `router`: its URL, "" = on this machine, as the settings say. Raises ConfigError for a URL that is none.
    """
    url = router.rstrip("/") or local_url(settings, settings.host, settings.port)
    try:
        path = f"/v1/requests/{urllib.parse.quote(request_id, safe='')}" if request_id else "/v1/requests"
        body = ask(url + path, settings)
        if as_json:
            print(body.decode())
        elif request_id:
            _show(TypeAdapter(RequestRecord).validate_json(body))
        else:
            _list(TypeAdapter(RequestList).validate_json(body).data)
        return 0
    except (Unavailable, RequestError) as error:
        print(f"baton: {error.message}", file=sys.stderr)
    except ValidationError as error:
        where = ".".join(map(str, error.errors()[0]["loc"]))
        print(
            f"baton: {url} answers in a form that is unknown here ({where}); is it a router of this version? "
            "Its /version tells, --json shows the answer as it is",
            file=sys.stderr,
        )
    return 1


def _show(record: RequestRecord) -> None:
    console = _console()
    console.print(f"request {record.id} (X-Request-Id {record.client_request_id})")
    console.print("  " + _course(record))
    console.print(f"  {_targets(record)}")
    if record.plan is None:
        console.print("  never planned")
        return
    console.print()
    console.print(_candidates(record.plan))
    console.print(f"\n{_choice(record.plan)}\n")
    chosen = next(each for each in record.plan.candidates if each.chosen)
    console.print(_comparison(record, chosen))
    for line in _notes(record):
        console.print(line)


def _course(record: RequestRecord) -> str:
    at = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(record.created))
    status = f" with {record.http_status}" if record.http_status else ""
    why = f" ({record.error})" if record.error else ""
    tokens = f"{record.prompt_tokens:,} tokens in, {record.completion_tokens:,} out"
    many = f" in {record.num_choices} choices" if record.num_choices > 1 else ""
    return f"{record.model}, {at}: {record.state}{status}{why}, {tokens}{many}"


def _targets(record: RequestRecord) -> str:
    wanted = [
        f"{name} within {_ms(target)} ms{f': {result}' if result else ''}"
        for name, target, result in (
            ("first token", record.targets.ttft_ms, record.slo.ttft),
            ("further tokens", record.targets.itl_ms, record.slo.itl),
        )
        if target is not None
    ]
    return "targets: " + (", ".join(wanted) or "none")


def _candidates(plan: PlanRecord) -> Table:
    title = "candidates, the best first; milliseconds"
    if plan.num_candidates > len(plan.candidates):
        title += f" ({len(plan.candidates)} of {plan.num_candidates})"
    table = _table(title, *("", "plan", "decode", "prefill"))
    for column in ("cached", "wait", "prefill", "load", "transfer", "TTFT", "ITL", "harm", "cost"):
        table.add_column(column, justify="right")
    table.add_column("meets")
    for each in plan.candidates:
        cells = (each.wait_ms, each.prefill_ms, each.load_ms, each.transfer_ms, each.ttft_ms, each.itl_ms)
        table.add_row(
            "->" if each.chosen else "",
            *(each.plan.value, each.decode, each.prefill or "-", f"{each.cached_tokens:,}"),
            *map(_ms, (*cells, each.harm_ms, each.cost_ms)),
            "yes" if each.meets else "no",
            style="bold" if each.chosen else None,
        )
    return table


def _choice(plan: PlanRecord) -> str:
    where = f"{plan.kind.value} on {plan.decode}" + (f" with {plan.prefill}" if plan.prefill else "")
    return f"chosen: {where}, because {WHY[plan.reason]} ({plan.reason.value})"


def _comparison(record: RequestRecord, chosen: Candidate) -> Table:
    """A decode worker counts from when its engine takes the request up: what came before is the real wait,
    with the way there and back. A prefill worker's queue is part of the predicted wait, but really comes
    later."""
    times = record.times
    known = times.planned_ttft_ms is not None and times.prefill_ms is not None
    wait = (times.planned_ttft_ms or 0.0) - (times.prefill_ms or 0.0) if known else None
    made = chosen.prefill_ms + chosen.load_ms + chosen.transfer_ms
    table = _table("predicted and real, milliseconds", "")
    for column in ("predicted", "real", "off by", ""):
        table.add_column(column, justify="right")
    rows: tuple[tuple[str, float | None, float | None], ...] = (
        ("wait for what was there before", chosen.wait_ms, wait),
        ("KV loaded, handed over and computed", made, times.prefill_ms),
        ("  of that, transfer not hidden", chosen.transfer_ms, times.transfer_exposed_ms),
        ("first token, from the plan on", chosen.ttft_ms, times.planned_ttft_ms),
        ("each further token", chosen.itl_ms, times.itl_ms),
    )
    for name, predicted, real in rows:
        table.add_row(name, _ms(predicted), _ms(real), *_off(predicted, real))
    return table


def _notes(record: RequestRecord) -> Iterable[str]:
    times, tokens = record.times, record.tokens_by_source
    yield (
        f"the client saw: first token after {_ms(times.ttft_ms)} ms, {_ms(times.router_ms)} of them before "
        f"the plan; further ones each {_ms(times.itl_ms)} ms, p99 {_ms(times.itl_p99_ms)}, longest "
        f"{_ms(times.itl_max_ms)}; {_ms(times.total_ms)} ms in all"
    )
    sources = {"cached on the decode worker": tokens.cached}
    sources |= {f"in {name}": count for name, count in tokens.tiers.items()}
    sources |= {
        f"from the prefill worker ({tokens.remote_cached:,} cached there)": tokens.remote,
        "computed on the decode worker": tokens.computed,
    }
    yield "its prompt's tokens: " + ", ".join(f"{count:,} {where}" for where, count in sources.items())
    for resume in record.resumes:
        yield (
            f"went on after {resume.num_tokens:,} tokens: from {resume.lost_worker} to {resume.worker} "
            f"({resume.cause.value})"
        )
    if record.source_plan:
        yield f"the decode worker's own choice of sources: {record.source_plan}"
    if record.source_error:
        yield f"a source failed: {record.source_error}"


def _list(requests: list[RequestSummary]) -> None:
    table = _table("the newest requests; milliseconds", *("id", "state", "plan", "reason"))
    for column in ("in", "out", "predicted", "first token", "each further", "total"):
        table.add_column(column, justify="right")
    table.add_column("targets")
    for each in requests:
        table.add_row(
            *(each.id, f"{each.state} {each.http_status or ''}".rstrip()),
            *(each.plan.value if each.plan else "-", each.reason.value if each.reason else each.error or "-"),
            *(f"{each.prompt_tokens:,}", f"{each.completion_tokens:,}", _ms(each.predicted_ttft_ms)),
            *(_ms(each.planned_ttft_ms), _ms(each.itl_ms), _ms(each.total_ms), each.slo or "-"),
        )
    _console().print(table)


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left", box=None, pad_edge=False)
    for column in columns:
        table.add_column(column, no_wrap=True)
    return table


def _console() -> Console:
    width = None if sys.stdout.isatty() else WIDTH
    return Console(width=width, highlight=False, soft_wrap=True, markup=False)


def _ms(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}"


def _off(predicted: float | None, real: float | None) -> tuple[str, str]:
    """The difference, and its share of what was real."""
    if predicted is None or real is None:
        return "-", ""
    return f"{predicted - real:+,.1f}", f"{(predicted - real) / real:+.0%}" if predicted and real else ""
