"""What a Grafana dashboard is made of: rows of panels, three abreast. Source: its JSON model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

Json = dict[str, Any]

DATASOURCE: Json = {"type": "prometheus", "uid": "${datasource}"}
SCHEMA_VERSION = 39
"""Of Grafana 10.4; later ones convert it when they load it."""

WIDTH, HEIGHT, COLUMNS = 8, 8, 24


@dataclass(frozen=True)
class Panel:
    """Curves over time, or one number with `stat`. `queries`: (legend, PromQL). `unit`: Grafana's name of it.
    `text`: what it shows and what to make of it."""

    title: str
    unit: str
    text: str
    queries: Sequence[tuple[str, str]]
    stat: bool = False


@dataclass(frozen=True)
class Row:
    title: str
    panels: Sequence[Panel]


@dataclass(frozen=True)
class Dashboard:
    uid: str
    title: str
    text: str
    rows: Sequence[Row]


def to_json(dashboard: Dashboard) -> Json:
    panels, y = [], 0
    for row in dashboard.rows:
        panels.append(
            {
                "type": "row",
                "title": row.title,
                "collapsed": False,
                "panels": [],
                "gridPos": {"x": 0, "y": y, "w": COLUMNS, "h": 1},
            }
        )
        y += 1
        for place, panel in enumerate(row.panels):
            line, column = divmod(place, COLUMNS // WIDTH)
            panels.append(_panel(panel, column * WIDTH, y + line * HEIGHT))
        y += HEIGHT * -(-len(row.panels) // (COLUMNS // WIDTH))
    return {
        "uid": dashboard.uid,
        "title": dashboard.title,
        "description": dashboard.text,
        "tags": ["baton"],
        "schemaVersion": SCHEMA_VERSION,
        "editable": True,
        "refresh": "10s",
        "time": {"from": "now-1h", "to": "now"},
        "timezone": "browser",
        "links": [
            {
                "type": "dashboards",
                "title": "Baton",
                "tags": ["baton"],
                "asDropdown": True,
                "includeVars": True,
                "keepTime": True,
            }
        ],
        "templating": {"list": _VARIABLES},
        "panels": [panel | {"id": number} for number, panel in enumerate(panels, 1)],
    }


_VARIABLES: list[Json] = [
    {"name": "datasource", "label": "Prometheus", "type": "datasource", "query": "prometheus"},
    {
        "name": "namespace",
        "label": "Namespace",
        "type": "query",
        "datasource": DATASOURCE,
        "query": {"query": "label_values(baton_workers, namespace)", "refId": "namespace"},
        "refresh": 2,
        "includeAll": True,
        "allValue": ".*",  # series without the label too, as outside of Kubernetes
        "current": {"text": "All", "value": "$__all"},
        "sort": 1,
    },
]


def _panel(panel: Panel, x: int, y: int) -> Json:
    form: Json = {
        "type": "stat" if panel.stat else "timeseries",
        "title": panel.title,
        "description": panel.text,
        "datasource": DATASOURCE,
        "gridPos": {"x": x, "y": y, "w": WIDTH, "h": HEIGHT},
        "fieldConfig": {"defaults": {"unit": panel.unit}, "overrides": []},
        "targets": [
            {
                "refId": chr(ord("A") + number),
                "datasource": DATASOURCE,
                "expr": query,
                "legendFormat": legend,
                "instant": panel.stat,
                "range": not panel.stat,
            }
            for number, (legend, query) in enumerate(panel.queries)
        ],
    }
    if panel.stat:
        form["options"] = {"reduceOptions": {"calcs": ["lastNotNull"]}, "colorMode": "value"}
    else:
        form["fieldConfig"]["defaults"]["min"] = 0
        form["options"] = {
            "legend": {"displayMode": "list", "placement": "bottom"},
            "tooltip": {"mode": "multi", "sort": "desc"},
        }
    return form
