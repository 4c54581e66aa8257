"""Numbers in the pool: as torch stores them, or 8-bit floats that kernels encode and decode themselves.

e5m2 is the first half of fp16 and e4m3 is that with one exponent bit less, so decoding is a shift, exact on
every card since Ampere (sm_80 has no e4m3 instructions). Formats: Micikevicius et al. 2022, "FP8 Formats for
Deep Learning". A stored number stands for itself times the scale given for K or for V.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

_FORMATS = {torch.float8_e4m3fn: "e4m3", torch.float8_e5m2: "e5m2"}

UNITS = {"plain": 1.0, "e4m3": 256.0, "e5m2": 1.0}
"""What `load_kv` leaves to the caller's scale: e4m3 read as fp16 is off by the biases, 2^(15 - 7)."""


def stored(pool: torch.Tensor) -> tuple[torch.Tensor, str]:
    """The pool as kernels address it (8-bit floats as bytes), and the name of its format."""
    kv_format = _FORMATS.get(pool.dtype, "plain")
    return (pool if kv_format == "plain" else pool.view(torch.uint8)), kv_format


@triton.jit
def load_kv(pointers, mask, FORMAT: tl.constexpr, DTYPE: tl.constexpr):
    """Numbers in DTYPE, still to be multiplied by scale * UNITS[FORMAT]; 0 where not `mask` (None: all)."""
    if FORMAT == "plain":
        value = tl.load(pointers, mask) if mask is None else tl.load(pointers, mask, other=0.0)
    else:
        code = tl.load(pointers, mask) if mask is None else tl.load(pointers, mask, other=0)
        code = code.to(tl.uint16)
        half = ((code & 0x80) << 8) | ((code & 0x7F) << 7) if FORMAT == "e4m3" else code << 8
        value = half.to(tl.float16, bitcast=True)
    if value.dtype != DTYPE:
        # By way of fp32, which the interpreter needs between the two 16-bit formats.
        value = value.to(tl.float32).to(DTYPE)
    return value


@triton.jit
def store_kv(pointers, value, scale, mask, FORMAT: tl.constexpr):
    """Write value / scale, both fp32, rounded to nearest even; 8-bit formats saturate at their largest."""
    value = tl.div_rn(value, scale)
    if FORMAT == "plain":
        tl.store(pointers, value.to(pointers.dtype.element_ty), mask)
    elif FORMAT == "e4m3":
        tl.store(pointers, _encode(value, 3, 7, 448.0), mask)
    else:
        tl.store(pointers, _encode(value, 2, 15, 57344.0), mask)


@triton.jit
def _encode(value, MANTISSA: tl.constexpr, BIAS: tl.constexpr, LARGEST: tl.constexpr):
    """The 8-bit code of fp32 numbers; NaN stays NaN."""
    SHIFT: tl.constexpr = 23 - MANTISSA
    size = tl.minimum(tl.abs(value), LARGEST)
    bits = size.to(tl.uint32, bitcast=True)
    # Add half of the last kept place, a bit less if that place is even; carries run into the exponent.
    normal = (bits + ((1 << (SHIFT - 1)) - 1) + ((bits >> SHIFT) & 1)) >> SHIFT
    normal -= (127 - BIAS) << MANTISSA
    # Added to this power of two, a subnormal's rounded integer is the sum's last bits.
    SMALLEST_NORMAL: tl.constexpr = 2.0 ** (1 - BIAS)
    subnormal = (size + 2.0 ** (SHIFT + 1 - BIAS)).to(tl.uint32, bitcast=True) & 0xF
    code = tl.where(size < SMALLEST_NORMAL, subnormal, normal)
    sign = (value.to(tl.uint32, bitcast=True) >> 24) & 0x80
    return tl.where(value == value, code | sign, 0x7F).to(tl.uint8)
