"""What the checks of the Triton kernels share: geometries, noise and poison on `DEVICE`.

Used by tests/engine (interpreted, after `interpreted_triton`) and by tests/gpu (compiled).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch
from hypothesis import strategies as st

from core.kv import BLOCK_SIZES

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
FP32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
TOLERANCE = {FP32: 2e-5, FP16: 4e-3, BF16: 2e-2}
NUM_LAYERS, LAYER = 2, 1
HEAD_DIMS = (64, 80, 96, 128, 256)

seeds = st.integers(0, 2**31)
dtypes = st.sampled_from([FP32, BF16, FP16])
kv_dtypes = st.sampled_from([FP32, BF16, FP16, E4M3, E5M2])


def close(got: torch.Tensor, want: torch.Tensor, dtype: torch.dtype) -> None:
    tolerance = TOLERANCE[dtype]
    torch.testing.assert_close(got.float().cpu(), want.float().cpu(), rtol=tolerance, atol=tolerance)


@contextmanager
def poisoned() -> Iterator[None]:
    """torch fills fresh tensors with NaN, so a number that is never written, or read before, shows."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        assert torch.empty(1).isnan().all()
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def noise(*shape: int, dtype: torch.dtype = FP32, scale: float = 1.0) -> torch.Tensor:
    return (torch.randn(shape) * scale).to(dtype).to(DEVICE)


def as_stored(values: torch.Tensor, dtype: torch.dtype, scale: float) -> torch.Tensor:
    """What the pool should hold for fp32 `values`: divided by the scale, saturated, rounded to nearest even."""
    if dtype not in (E4M3, E5M2):
        return values.to(dtype)
    largest = torch.finfo(dtype).max
    return (values / scale).clamp(-largest, largest).to(dtype)


@dataclass(frozen=True)
class Geometry:
    """`group` query heads share one of `num_kv_heads`."""

    num_kv_heads: int
    group: int
    head_dim: int
    block_size: int
    dtype: torch.dtype
    kv_dtype: torch.dtype
    k_scale: float = 1.0
    v_scale: float = 1.0

    @property
    def num_heads(self) -> int:
        return self.num_kv_heads * self.group

    @property
    def qkv_width(self) -> int:
        return (self.num_heads + 2 * self.num_kv_heads) * self.head_dim

    def pool(self, num_blocks: int) -> torch.Tensor:
        """All NaN."""
        shape = (num_blocks, NUM_LAYERS, self.num_kv_heads, 2, self.block_size, self.head_dim)
        return torch.full(shape, float("nan")).to(self.kv_dtype).to(DEVICE)


@st.composite
def geometries(draw: st.DrawFn) -> Geometry:
    """Any, but for fp32 over a narrower pool at head dim 256, which is refused."""
    geometry = Geometry(
        num_kv_heads=draw(st.integers(1, 2)),
        group=draw(st.sampled_from([1, 2, 3, 4, 5, 8])),
        head_dim=draw(st.sampled_from(HEAD_DIMS)),
        block_size=draw(st.sampled_from(BLOCK_SIZES)),
        dtype=draw(dtypes),
        kv_dtype=draw(kv_dtypes),
    )
    if geometry.head_dim == 256 and geometry.dtype == FP32:
        return replace(geometry, kv_dtype=FP32)
    if geometry.kv_dtype not in (E4M3, E5M2):
        return geometry
    scales = st.sampled_from([0.02, 1.0, 1.7])
    return replace(geometry, k_scale=draw(scales), v_scale=draw(scales))
