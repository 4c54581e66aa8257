"""Dashboards and alerts, without Grafana or Prometheus: every query parses, names what is exported, by labels that
are there; whatever is exported is shown; each alert has a page that says what to do."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
import yaml
from deploy_promql import Exported, exported, problems

from deploy.check.queries import GOLDEN
from deploy.check.render import ROOT, composed
from deploy.observability.__main__ import HERE, files

DASHBOARDS = sorted((HERE / "grafana").glob("*.json"))
RULES = [
    rule for group in yaml.safe_load((HERE / "rules.yaml").read_text())["groups"] for rule in group["rules"]
]
ALERTS = [rule for rule in RULES if "alert" in rule]
RECORDED = {rule["record"]: frozenset[str]() for rule in RULES if "record" in rule}
RUNBOOKS = ROOT / "docs/deploy/troubleshooting.md"

dashboards = pytest.mark.parametrize("path", DASHBOARDS, ids=[path.stem for path in DASHBOARDS])


@pytest.fixture(scope="module")
def known() -> Exported:
    return {**exported(), **RECORDED}


def panels(path: Path) -> list[dict[str, Any]]:
    return json.loads(path.read_text())["panels"]


def queries(path: Path) -> Iterator[str]:
    """As Prometheus would get them."""
    for panel in panels(path):
        for target in panel.get("targets", ()):
            yield target["expr"].replace("$__rate_interval", "1m").replace("$namespace", ".*")


def test_what_we_know_of_exports_is_what_is_exported(known: Exported):
    """The labels below stand for the names that real processes are compared with elsewhere."""
    golden = {name for path in GOLDEN for name in path.read_text().split()}
    bases = {
        re.sub(r"_(bucket|sum|count)$", "", name)
        for name in known.keys() - RECORDED.keys()
        if not name.endswith("_created")
    }
    assert bases == golden


def test_what_is_committed_is_what_would_be_written():
    for path, text in files().items():
        assert path.read_text() == text, f"run python -m deploy.observability: {path.name}"
    assert {path for path in files() if path.suffix == ".json"} == set(DASHBOARDS)


@dashboards
def test_every_query_of_a_panel_is_of_what_is_there(path: Path, known: Exported):
    asked = list(queries(path))
    assert len(asked) >= 10
    assert {query: problems(query, known) for query in asked} == {query: [] for query in asked}


def test_every_rule_is_of_what_is_there(known: Exported):
    found = {rule.get("alert") or rule.get("record"): problems(rule["expr"], known) for rule in RULES}
    assert len(found) == len(RULES)
    assert found == {name: [] for name in found}


@pytest.mark.parametrize(
    ("query", "sentence"),
    [
        ("sum(baton_num_running)", "nobody exports baton_num_running"),
        ('baton_kv_cache_usage_perc{pool="a"}', "baton_kv_cache_usage_perc has no label pool"),
        ("sum by (tier) (rate(baton_kv_loads_total[1m]))", "tier is no label of what it groups"),
        ("baton_time_to_first_token_seconds", "nobody exports baton_time_to_first_token_seconds"),
    ],
)
def test_a_planted_error_is_found(query: str, sentence: str, known: Exported):
    assert problems(query, known) == [sentence]


def test_what_is_no_promql_is_refused(known: Exported):
    with pytest.raises(ValueError):
        problems("sum(rate(baton_requests_total[1m])", known)


def test_whatever_is_exported_is_shown(known: Exported):
    """Under our own name; who adds a metric shows it or alerts by it."""
    text = "\n".join(
        [*(query for path in DASHBOARDS for query in queries(path)), *(rule["expr"] for rule in RULES)]
    )
    named = set(re.findall(r"\bbaton_[a-z0-9_]+", text))
    shown = {re.sub(r"_bucket$", "", name) for name in named}
    ours = {name for path in GOLDEN for name in path.read_text().split() if name.startswith("baton_")}
    assert ours - shown == set()


@dashboards
def test_a_dashboard_is_what_grafana_reads(path: Path):
    board = json.loads(path.read_text())
    assert board["uid"] == path.stem
    assert re.fullmatch(r"[a-z0-9-]{1,40}", board["uid"])
    assert board["title"]
    assert {variable["name"] for variable in board["templating"]["list"]} == {"datasource", "namespace"}
    ids = [panel["id"] for panel in board["panels"]]
    assert len(set(ids)) == len(ids)
    for panel in board["panels"]:
        assert panel["type"] in ("row", "stat", "timeseries")
        if panel["type"] == "row":
            continue
        assert panel["title"]
        assert panel["description"].endswith(".")
        assert panel["fieldConfig"]["defaults"]["unit"] in (
            *("s", "reqps", "percentunit", "Bps", "bytes", "short"),
        )
        references = [target["refId"] for target in panel["targets"]]
        assert len(set(references)) == len(references) > 0
        for target in panel["targets"]:
            assert target["datasource"] == {"type": "prometheus", "uid": "${datasource}"}
            labels = re.findall(r"{{(\w+)}}", target["legendFormat"])
            assert all(re.search(rf"\bby \([^)]*\b{label}\b", target["expr"]) for label in labels), target


@dashboards
def test_no_panel_lies_on_another(path: Path):
    def cells(panel: dict[str, Any]) -> set[tuple[int, int]]:
        place = panel["gridPos"]
        across, down = range(place["x"], place["x"] + place["w"]), range(place["y"], place["y"] + place["h"])
        assert across.stop <= 24
        return {(x, y) for x in across for y in down}

    assert all(not cells(one) & cells(other) for one, other in combinations(panels(path), 2))


@pytest.mark.parametrize("rule", ALERTS, ids=[rule["alert"] for rule in ALERTS])
def test_an_alert_says_how_bad_it_is_and_what_to_do(rule: dict[str, Any]):
    assert rule["labels"]["severity"] in ("page", "ticket")
    assert rule["annotations"]["summary"].endswith(".")
    anchors = {
        re.sub(r"[^a-z0-9 -]", "", title.lower()).replace(" ", "-")
        for title in re.findall(r"^## (.+)$", RUNBOOKS.read_text(), re.MULTILINE)
    }
    assert rule["annotations"]["runbook"] in anchors
    labels = set(re.findall(r"\$labels\.(\w+)", rule["annotations"]["summary"]))
    grouping = re.search(r"\bby \(([^)]*)\)", rule["expr"])
    assert labels <= set(grouping[1].split(", ") if grouping else ["worker"])


def test_every_recorded_series_is_used():
    used = "\n".join(rule["expr"] for rule in ALERTS)
    assert all(name in used for name in RECORDED)


def test_kustomize_adds_them_to_an_overlay():
    text = composed(ROOT / "deploy/k8s", "cpu", ["../../observability"])
    objects = {(each["kind"], each["metadata"]["name"]): each for each in yaml.safe_load_all(text)}
    assert ("PrometheusRule", "baton") in objects
    assert sorted(objects["ConfigMap", "baton-dashboards"]["data"]) == [path.name for path in DASHBOARDS]
