"""`python -m deploy.observability`: writes the dashboards and, of rules.yaml, Kubernetes' PrometheusRule."""

from __future__ import annotations

import json
from pathlib import Path

import yaml

from deploy.observability.kv import KV
from deploy.observability.overview import OVERVIEW
from deploy.observability.panels import to_json
from deploy.observability.requests import REQUESTS

HERE = Path(__file__).parent


def files() -> dict[Path, str]:
    """What is written where."""
    rules = yaml.safe_load((HERE / "rules.yaml").read_text())
    custom = {
        "apiVersion": "monitoring.coreos.com/v1",
        "kind": "PrometheusRule",
        "metadata": {"name": "baton"},
        "spec": rules,
    }
    told = "# Written by `python -m deploy.observability` from rules.yaml.\n"
    written = {HERE / "prometheus-rule.yaml": told + yaml.safe_dump(custom, sort_keys=False, width=110)}
    for dashboard in (OVERVIEW, KV, REQUESTS):
        text = json.dumps(to_json(dashboard), indent=1) + "\n"
        written[HERE / "grafana" / f"{dashboard.uid}.json"] = text
    return written


if __name__ == "__main__":
    for path, text in files().items():
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
