"""The fast CPU kernel set, in C (`cpu/`).

Why C at all, on one AVX512-BF16 core: products with few rows are bound by memory, and torch reads
weights at 9-11 GB/s where the core can read 28.
"""

from __future__ import annotations

import ctypes
import os
from dataclasses import dataclass

import torch

from checkpoint.config import ModelConfig
from core.kv import KVLayout
from engine.batch import Batch
from engine.kernels.int8 import GROUP, QuantizedWeight, Weight
from engine.kernels.native_build import build
from engine.kernels.torch_kernels import TorchKernels
from engine.kv_cache import KVCache

_MAX_HEAD_DIM = 256
_ptr, _int64, _int, _float = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int, ctypes.c_float


_FORMATS = ("fp32", "bf16", "fp8_e4m3", "fp8_e5m2", "int8", "int4")
"""Their order is that of the enum in cpu/kv_numbers.h."""


class _Pool(ctypes.Structure):
    """`Pool` of cpu/pool.h: one layer of a KVCache."""

    _fields_ = [
        ("layer", _ptr),
        ("block_nbytes", _int64),
        ("key_nbytes", _int64),
        ("value_nbytes", _int64),
        ("key_format", _int64),
        ("value_format", _int64),
        ("num_kv_heads", _int64),
        ("block_size", _int64),
        ("head_dim", _int64),
    ]


_SIGNATURES = {
    "baton_linear": (_ptr, _ptr, _ptr, _int64, _int64, _int64, _int, _int),
    "baton_linear_int8": (_ptr, _ptr, _ptr, _ptr, _ptr, _int64, _int64, _int64, _int, _int),
    "baton_rms_norm": (_ptr, _ptr, _ptr, _ptr, _int64, _int64, _float, _int),
    "baton_silu_mul": (_ptr, _ptr, _int64, _int64, _int),
    "baton_rope_and_store": (_ptr, _ptr, _ptr, _ptr, _int64, _int64, _ptr, _int),
    "baton_head_norm": (_ptr, _ptr, _ptr, _int64, _int64, _int64, _int64, _float, _int),
    "baton_attention": (
        *(_ptr, _ptr, _ptr, _ptr, _ptr, _int64),
        *(_int64, _int64, _ptr, _int64, _int),
    ),
}


def unsupported(config: ModelConfig, layout: KVLayout) -> str:
    """Why the C kernels cannot run this model, as a phrase for the log; empty when it can."""
    widths = {
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_heads * head_dim": config.num_heads * config.head_dim,
    }
    for name, width in widths.items():
        if width % 32:
            return f"{name} {width} is no multiple of 32"
    if config.head_dim % 16 or not 32 <= config.head_dim <= _MAX_HEAD_DIM:
        return f"head_dim {config.head_dim} is no multiple of 16 from 32 to {_MAX_HEAD_DIM}"
    if layout.kv_dtype == "fp16":
        return f"the KV dtype is {layout.kv_dtype}"
    return ""


@dataclass(frozen=True, slots=True)
class _Plan:
    """`pools`: each layer as the C kernels see it."""

    batch: Batch
    pools: list[_Pool]


class NativeKernels(TorchKernels):
    """For models and layouts that `unsupported` has nothing against. Raises BuildFailed.

    Deterministic: a row's result is the same bit for bit in every batch and however its prompt is cut into
    chunks, since each kernel adds up a row's numbers in an order that depends on its position alone.
    """

    name = "native"

    def __init__(self, cache_dir: str | os.PathLike[str], sliding_window: int = 0) -> None:
        super().__init__(sliding_window)
        library = ctypes.CDLL(str(build(cache_dir)))
        for name, arguments in _SIGNATURES.items():
            function = getattr(library, name)
            function.argtypes, function.restype = arguments, None
        self._lib = library
        self._pools: tuple[KVCache, list[_Pool]] | None = None

    def plan(self, batch: Batch, cache: KVCache) -> _Plan:
        # OpenMP counts threads per calling thread; torch passes its own number on when it is asked.
        torch.get_num_threads()
        return _Plan(batch, self._pools_of(cache))

    def linear(self, x: torch.Tensor, weight: Weight, bias: torch.Tensor | None = None) -> torch.Tensor:
        out = self._linear(x, weight, x.dtype)
        return out if bias is None else out.add_(bias)

    def logits(self, x: torch.Tensor, weight: Weight) -> torch.Tensor:
        """In fp32 straight from the sums: rounding logits to bf16 first would tie the best tokens."""
        return self._linear(x, weight, torch.float32)

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        return self._rms_norm(None, x, weight, eps)

    def add_rms_norm(
        self, delta: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> torch.Tensor:
        return self._rms_norm(delta.data_ptr(), residual, weight, eps)

    def silu_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        rows, width = gate_up.shape
        out = gate_up.new_empty(rows, width // 2)
        self._lib.baton_silu_mul(gate_up.data_ptr(), out.data_ptr(), rows, width // 2, _is_bf16(gate_up))
        return out

    def rope_and_store(
        self, qkv: torch.Tensor, rope: torch.Tensor, batch: Batch, cache: KVCache, layer: int
    ) -> None:
        pool = self._pools_of(cache)[layer]
        self._lib.baton_rope_and_store(
            qkv.data_ptr(),
            rope.data_ptr(),
            batch.positions.data_ptr(),
            batch.slots.data_ptr(),
            qkv.shape[0],
            _num_heads(qkv, cache),
            ctypes.addressof(pool),
            _is_bf16(qkv),
        )

    def head_norm(
        self, qkv: torch.Tensor, q_weight: torch.Tensor, k_weight: torch.Tensor, eps: float, layout: KVLayout
    ) -> None:
        self._lib.baton_head_norm(
            qkv.data_ptr(),
            q_weight.data_ptr(),
            k_weight.data_ptr(),
            qkv.shape[0],
            qkv.shape[1] // layout.head_dim - 2 * layout.num_kv_heads,
            layout.num_kv_heads,
            layout.head_dim,
            eps,
            _is_bf16(qkv),
        )

    def attention(self, qkv: torch.Tensor, cache: KVCache, layer: int, plan: _Plan) -> torch.Tensor:
        num_heads, batch = _num_heads(qkv, cache), plan.batch
        out = qkv.new_empty(qkv.shape[0], num_heads * cache.layout.head_dim)
        self._lib.baton_attention(
            qkv.data_ptr(),
            out.data_ptr(),
            batch.row_starts.data_ptr(),
            batch.kv_lens.data_ptr(),
            batch.block_tables.data_ptr(),
            batch.block_tables.shape[1],
            batch.num_seqs,
            num_heads,
            ctypes.addressof(plan.pools[layer]),
            self._window,
            _is_bf16(qkv),
        )
        return out

    def _linear(self, x: torch.Tensor, weight: Weight, dtype: torch.dtype) -> torch.Tensor:
        rows, width = x.shape
        out = x.new_empty(rows, weight.shape[0], dtype=dtype)
        if isinstance(weight, QuantizedWeight):
            scratch = x.new_empty(rows * (width + 8 * -(-width // GROUP)), dtype=torch.uint8)
            self._lib.baton_linear_int8(
                x.data_ptr(),
                weight.packed.data_ptr(),
                weight.scales.data_ptr(),
                out.data_ptr(),
                scratch.data_ptr(),
                rows,
                weight.shape[0],
                width,
                _is_bf16(x),
                _is_bf16(out),
            )
            return out
        self._lib.baton_linear(
            x.data_ptr(),
            weight.data_ptr(),
            out.data_ptr(),
            rows,
            weight.shape[0],
            width,
            _is_bf16(x),
            _is_bf16(out),
        )
        return out

    def _rms_norm(self, delta: int | None, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        out = torch.empty_like(x)
        self._lib.baton_rms_norm(
            delta, x.data_ptr(), weight.data_ptr(), out.data_ptr(), *x.shape, eps, _is_bf16(x)
        )
        return out

    def _pools_of(self, cache: KVCache) -> list[_Pool]:
        if self._pools is None or self._pools[0] is not cache:
            self._pools = (cache, [_pool(cache, layer) for layer in range(cache.layout.num_layers)])
        return self._pools[1]


def _pool(cache: KVCache, layer: int) -> _Pool:
    layout, formats = cache.layout, cache.layout.formats(layer)
    return _Pool(
        cache.keys(layer).numbers.data_ptr(),
        layout.block_nbytes,
        *map(layout.run_nbytes, formats),
        *map(_FORMATS.index, formats),
        layout.num_kv_heads,
        layout.block_size,
        layout.head_dim,
    )


def _num_heads(qkv: torch.Tensor, cache: KVCache) -> int:
    return qkv.shape[1] // cache.layout.head_dim - 2 * cache.layout.num_kv_heads


def _is_bf16(tensor: torch.Tensor) -> bool:
    return tensor.dtype == torch.bfloat16
