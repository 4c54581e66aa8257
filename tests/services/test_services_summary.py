"""What `baton serve` shows of its workers."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from core.settings import Settings
from services.summary import show_summary

FOOTPRINT = {
    "device": "cpu", "dtype": "fp32", "dtype_reason": "as set", "quantization": "none",
    "tensor_parallel_size": 1, "weights_nbytes": 2**20, "activations_nbytes": 2**20, "other_nbytes": 2**20,
    "kv_nbytes": 2**20, "num_blocks": 4, "num_tokens": 64, "max_model_len": 64, "concurrency": 1.0,
    "kv_dtype": "int8/skip=0", "bytes_per_token": 16384,
}  # fmt: skip


@pytest.mark.parametrize(
    ("own", "place"),
    [
        ({}, "0,1 "),
        ({"tensor_parallel_size": 2}, "0,1 (TP 2)"),
        ({"device": "A100"}, "A100 "),
    ],
)
def test_where_a_worker_runs(own: dict[str, Any], place: str, capsys: pytest.CaptureFixture[str]):
    body = {"footprint": FOOTPRINT | own, "cores": [0, 1]}
    worker: Any = SimpleNamespace(name="decode-0", pid=7, probe=lambda: body)
    show_summary(Settings(), "http://127.0.0.1:8000", [worker])
    shown = capsys.readouterr().out
    assert place in shown
    assert "16384 bytes of KV per token in int8/skip=0" in " ".join(shown.split())
