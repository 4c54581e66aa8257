"""The manifests' autoscalers hold the numbers of planning/scaling.py."""

from __future__ import annotations

from typing import Any

import pytest
import yaml

from core.settings import Settings
from deploy.check.render import K8S
from planning import scaling

SEQUENCES = scaling.SEAT_SHARE * Settings.model_fields["max_num_seqs"].default
KEDA = {
    "backlog": scaling.BACKLOG_S,
    "ttft-pressure": scaling.PRESSURE,
    "kv-usage": scaling.KV_USAGE,
    "sequences": SEQUENCES,
    "itl-pressure": scaling.PRESSURE,
}
HPA = {
    "baton_prefill_backlog_seconds": scaling.BACKLOG_S,
    "baton_kv_cache_usage_perc": scaling.KV_USAGE,
    "baton_num_requests_running": SEQUENCES,
}


def scalers(overlay: str) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all((K8S / "overlays" / overlay / "scalers.yaml").read_text()))


def quantity(text: str) -> float:
    return float(text[:-1]) / 1000 if text.endswith("m") else float(text)


def test_keda_has_the_thresholds():
    triggers = [trigger for each in scalers("keda") for trigger in each["spec"]["triggers"]]
    assert {each["name"]: float(each["metadata"]["threshold"]) for each in triggers} == KEDA
    pressures = [each["metadata"]["query"] for each in triggers if each["name"].endswith("pressure")]
    assert all(f"[{scaling.PRESSURE_S / 60:.0f}m]" in query for query in pressures)
    assert all(
        each["metricType"] == ("Value" if "pressure" in each["name"] else "AverageValue") for each in triggers
    )


def test_the_plain_autoscaler_has_the_thresholds():
    metrics = [metric["pods"] for each in scalers("hpa") for metric in each["spec"]["metrics"]]
    assert {each["metric"]["name"]: quantity(each["target"]["averageValue"]) for each in metrics} == HPA


@pytest.mark.parametrize("overlay", ["keda", "hpa"])
def test_they_grow_and_shrink_as_fast(overlay: str):
    for scaler in scalers(overlay):
        spec = scaler["spec"]
        if overlay == "keda":
            spec = spec["advanced"]["horizontalPodAutoscalerConfig"]
        assert spec["behavior"] == {
            "scaleUp": {
                "stabilizationWindowSeconds": 0,
                "policies": [{"type": "Percent", "value": 100, "periodSeconds": scaling.PERIOD_S}],
            },
            "scaleDown": {
                "stabilizationWindowSeconds": scaling.WINDOW_S,
                "policies": [{"type": "Pods", "value": 1, "periodSeconds": scaling.SHRINK_EVERY_S}],
            },
        }
