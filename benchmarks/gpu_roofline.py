"""What a kernel is measured by: the twin's answer, the device's ceilings, torch on the same numbers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from statistics import median

import torch

TOLERANCE = 2e-2
"""Largest difference to the twin, as `apart` gives it, in bf16 and fp8."""

Run = Callable[[], object]


@dataclass(frozen=True, slots=True)
class Ceilings:
    """What this device reaches in practice."""

    copy_bytes_s: float
    matmul_flop_s: float


@dataclass(frozen=True, slots=True)
class Case:
    """`work`: bytes that must move, or operations when `is_flops`. `error`: see `apart`; called before `run`
    is timed. `rival`: torch on the same numbers, contiguous where it needs that."""

    kernel: str
    shape: str
    error: Callable[[], float]
    run: Run
    work: float
    is_flops: bool = False
    rival: Run | None = None


@dataclass(frozen=True, slots=True)
class Row:
    """`share` of the ceiling, 0-1; `rival_ms` 0 where there is none."""

    kernel: str
    shape: str
    error: float
    ms: float
    reached: str
    share: float
    rival_ms: float

    @property
    def is_right(self) -> bool:
        return self.error <= TOLERANCE


def measure_ceilings(device: torch.device) -> Ceilings:
    source = torch.empty(2**30, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    copy_ms = time_ms(lambda: target.copy_(source))
    a = torch.randn(8192, 8192, device=device).to(torch.bfloat16)
    matmul_ms = time_ms(lambda: a @ a)
    return Ceilings(2 * source.nbytes / copy_ms * 1e3, 2 * 8192**3 / matmul_ms * 1e3)


def measure(case: Case, ceilings: Ceilings) -> Row:
    error, ms = case.error(), time_ms(case.run)
    rate, ceiling = case.work / ms * 1e3, ceilings.matmul_flop_s if case.is_flops else ceilings.copy_bytes_s
    reached = f"{rate / 1e12:.1f} TFLOP/s" if case.is_flops else f"{rate / 1e9:.0f} GB/s"
    rival_ms = time_ms(case.rival) if case.rival else 0.0
    return Row(case.kernel, case.shape, error, ms, reached, rate / ceiling, rival_ms)


def time_ms(run: Run, repeat: int = 20) -> float:
    """Median milliseconds on the device, after three runs to warm up."""
    for _ in range(3):
        run()
    times = []
    for _ in range(repeat):
        began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        began.record()
        run()
        ended.record()
        ended.synchronize()
        times.append(began.elapsed_time(ended))
    return median(times)


def apart(got: torch.Tensor, want: torch.Tensor) -> float:
    """The largest difference relative to what is right plus its root mean square; infinite for a NaN."""
    got, want = got.float(), want.float()
    worst = ((got - want).abs() / (want.abs() + want.square().mean().sqrt())).max()
    return float(torch.where(worst.isnan(), torch.inf, worst))
