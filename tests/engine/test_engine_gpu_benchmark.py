"""The kernel cases of benchmarks.gpu, interpreted on small shapes, so that they hold when a GPU is at hand."""

from __future__ import annotations

from math import inf

import httpx
import interpreted_triton  # noqa: F401  (before every import of the kernels)
import pytest
import torch

from benchmarks import gpu, gpu_attention, gpu_kernels, gpu_roofline, gpu_serve
from benchmarks.gpu_roofline import Ceilings, apart

# Numpy warns where hardware silently goes to infinity, in lanes that a mask drops.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

SIZES = {
    "TOKENS": 16, "HIDDEN": 64, "HEADS": 4, "KV_HEADS": 2, "DIM": 64, "INNER": 48, "VOCAB": 300, "NUM_BLOCKS": 4,
    "LAYERS": 2, "ROWS": 3,
}  # fmt: skip


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    def once(run: gpu_roofline.Run) -> float:
        run()
        return 1.0

    monkeypatch.setattr(gpu_roofline, "time_ms", once)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "an interpreter")
    monkeypatch.setattr(gpu_roofline, "measure_ceilings", lambda _: Ceilings(1e12, 1e15))
    for name, value in SIZES.items():
        for module in (gpu_kernels, gpu_attention):
            if hasattr(module, name):
                monkeypatch.setattr(module, name, value)
    monkeypatch.setattr(gpu_kernels, "QKV", (4 + 2 * 2) * 64)
    monkeypatch.setattr(gpu_attention, "CHECKED", ((7, 20), (9, 0)))
    monkeypatch.setattr(gpu_attention, "PREFILLS", ((17, 9),))
    monkeypatch.setattr(gpu_attention, "DECODES", ((1, 20, "bf16"), (2, 33, "fp8_e4m3"), (2, 17, "fp8_e5m2")))


def test_every_kernel_is_in_the_table_and_right(capsys: pytest.CaptureFixture[str]) -> None:
    assert gpu.check_kernels(torch.device("cpu"), deadline=inf) == []
    rows = [line.split(" | ") for line in capsys.readouterr().out.splitlines() if line.startswith("| ")]
    assert {row[0].removeprefix("| ") for row in rows[1:]} == {
        "rms_norm", "add_rms_norm", "silu_mul", "head_norm", "rope_and_store", "gather_blocks",
        "scatter_blocks", "prefill_attention", "decode_attention", "logits (cuBLAS)", "sample (top-k, top-p)",
    }  # fmt: skip


def test_a_wrong_kernel_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_attention, "decode_attention", lambda qkv, pool, out, *_: out.zero_())
    monkeypatch.setattr(gpu_kernels, "kernel_cases", lambda _: iter(()))
    wrong = gpu.check_kernels(torch.device("cpu"), deadline=inf)
    assert [sentence.split(" (")[0] for sentence in wrong] == ["decode_attention"] * 3


def test_nothing_is_begun_after_the_deadline(capsys: pytest.CaptureFixture[str]) -> None:
    (wrong,) = gpu.check_kernels(torch.device("cpu"), deadline=0.0)
    assert wrong.startswith("the time is over before rms_norm")
    assert "rms_norm" not in capsys.readouterr().out
    client = httpx.Client(transport=httpx.MockTransport(lambda _: httpx.Response(500)))
    with pytest.raises(SystemExit, match="the time for this check is over"):
        gpu_serve._ask(client, "m", [1], "local", 1, "", deadline=0.0)


def test_a_nan_is_infinitely_wrong() -> None:
    assert apart(torch.tensor([1.0, float("nan")]), torch.tensor([1.0, 1.0])) == float("inf")
    assert apart(torch.tensor([1.0, 1.5]), torch.tensor([1.0, 1.0])) == pytest.approx(0.25)


def test_without_a_gpu_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["gpu"])
    with pytest.raises(SystemExit, match="finds no CUDA device here; nothing was checked"):
        gpu.main()
