"""Compiles every shipped Triton kernel for CUDA targets, without a GPU, and shows what ptxas made of it.

    python -m benchmarks.triton_aot [--targets 80,90] [--kernels decode,prefill] [--only "dim 128"] [--json]

The launches are recorded from the package's own functions, called on tensors without memory, so that what is
compiled here is what a GPU will run. Ends with status 1 if a kernel spills registers or needs more shared
memory than the smallest supported card has.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass

import torch
import triton
from rich.console import Console
from rich.table import Table
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from core.kv import KVLayout
from engine.kernels.triton import activation, block_copy, decode, norm, prefill, rope, sample

KERNELS = {
    "rms_norm": norm.rms_norm_kernel,
    "head_norm": norm.head_norm_kernel,
    "silu_mul": activation.silu_mul_kernel,
    "rope": rope.rope_and_store_kernel,
    "prefill": prefill.prefill_kernel,
    "decode": decode.decode_kernel,
    "reduce": decode.reduce_kernel,
    "copy": block_copy.copy_kernel,
    "sample": sample.sample_kernel,
}
TARGETS = (80, 90, 100)
SHARED_LIMIT = 99 * 1024
"""Bytes a block may have on sm_86, sm_89 and sm_120; the data centre cards have more."""

HEAD_DIMS = (64, 80, 96, 128, 256)
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
FORMATS = (
    (BF16, BF16),
    (BF16, E4M3),
    (BF16, E5M2),
    (FP16, FP16),
    (FP16, E4M3),
    (FP32, FP32),
    (BF16, FP32),
    (FP32, BF16),
)
"""(compute, KV) dtypes; the rest of the pairs share their kind of tile with one of these."""


@dataclass(frozen=True, slots=True)
class Compiled:
    """`shared`: bytes per block; `spills`: bytes of registers kept in local memory per thread."""

    kernel: str
    variant: str
    target: str
    num_warps: int
    registers: int
    shared: int
    spills: int


@dataclass(frozen=True, slots=True)
class Launch:
    """One recorded launch: what it is for, and its arguments."""

    kernel: str
    variant: str
    args: tuple[object, ...]
    kwargs: dict[str, object]


@contextmanager
def _recording(variant: str, into: list[Launch]) -> Iterator[None]:
    """Within, kernels do not run; their launches are appended to `into`."""

    def recorder(name: str):
        def record(*args: object, grid: object, warmup: bool, **kwargs: object) -> None:
            into.append(Launch(name, variant, args, kwargs))

        return record

    for name, kernel in KERNELS.items():
        kernel.run = recorder(name)
    try:
        yield
    finally:
        for kernel in KERNELS.values():
            del kernel.run


def launches() -> list[Launch]:
    """Each kernel in each shape the tables know, on the geometry of an 8B model (32 heads, 8 KV heads)."""
    found: list[Launch] = []
    for head_dim in HEAD_DIMS:
        for dtype, kv_dtype in FORMATS:
            if head_dim <= 128 or (dtype, kv_dtype) != (FP32, BF16):
                _record_attention(head_dim, dtype, kv_dtype, 0, found)
        for kv_dtype in (BF16, E4M3):
            _record_attention(head_dim, BF16, kv_dtype, 4096, found)
    for dtype in (BF16, FP32):
        for width in (128, 4096, 16384):
            with _recording(f"{_name(dtype)} width {width}", found):
                x, weight = _meta(64, width, dtype=dtype), _meta(width, dtype=dtype)
                norm.rms_norm(x, weight, 1e-5)
                norm.add_rms_norm(x, x, weight, 1e-5)
        with _recording(_name(dtype), found):
            activation.silu_mul(_meta(64, 28672, dtype=dtype))
    with _recording("fp32", found):
        sample.sample(_meta(64, 128256, dtype=FP32), _meta(64, 5, dtype=FP32))
    with _recording("bf16", found):
        pool, block_ids = _meta(1024, 32, 8, 2, 16, 128, dtype=BF16), _meta(64, dtype=torch.int32)
        block_copy.gather_blocks(pool, block_ids, _meta(64, 32, 8, 2, 16, 128, dtype=BF16))
        half = _meta(64, 32, 4, 2, 16, 128, dtype=BF16)
        block_copy.scatter_blocks(pool, block_ids, half, range(4), range(4))
    return found


def _record_attention(
    head_dim: int, dtype: torch.dtype, kv_dtype: torch.dtype, window: int, into: list[Launch]
) -> None:
    pool = _meta(1024, 32, 8, 2, 16, head_dim, dtype=kv_dtype)[:, 3]
    qkv, out = _meta(64, 48 * head_dim, dtype=dtype), _meta(64, 32 * head_dim, dtype=dtype)
    positions, lens = _meta(64, dtype=torch.int64), _meta(64, dtype=torch.int32)
    starts, tables = _meta(65, dtype=torch.int32), _meta(64, 512, dtype=torch.int32)
    variant = f"dim {head_dim} {_name(dtype)}" + (f"/{_name(kv_dtype)}" if kv_dtype != dtype else "")
    with _recording(variant + (" window" if window else ""), into):
        if not window:
            if kv_dtype == dtype:
                gain = _meta(head_dim, dtype=dtype)
                norm.head_norm(qkv, gain, gain, 1e-6, KVLayout(32, 8, head_dim, 16, "bf16"))
            rope.rope_and_store(qkv, _meta(8192, 2, head_dim // 2, dtype=FP32), positions, positions, pool)
        prefill.prefill_attention(qkv, pool, out, starts, 0, 512, lens, tables, window)
        decode.decode_attention(qkv, pool, out, 64, lens, tables, window)
        decode.decode_attention(qkv, pool, out, 64, lens, tables[:, :32], window)


def _meta(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def _name(dtype: torch.dtype) -> str:
    return {BF16: "bf16", FP16: "fp16", FP32: "fp32", E4M3: "e4m3", E5M2: "e5m2"}[dtype]


def compile_launch(launch: Launch, capability: int) -> Compiled:
    """Compile for sm_`capability`, specialised as the launcher would: 1 and multiples of 16 are known."""
    kernel = KERNELS[launch.kernel]
    given = dict(zip(kernel.arg_names, launch.args, strict=False)) | launch.kwargs
    signature: dict[str, str] = {}
    constexprs: dict[str, object] = {}
    attrs: dict[tuple[int, ...], list[list[object]]] = {}
    for index, param in enumerate(kernel.params):
        value = given.pop(param.name)
        specialised = not param.do_not_specialize
        if param.is_constexpr or (specialised and isinstance(value, int) and value == 1):
            signature[param.name], constexprs[param.name] = "constexpr", value
            continue
        signature[param.name] = _type_of(value)
        if isinstance(value, torch.Tensor) or (specialised and isinstance(value, int) and value % 16 == 0):
            attrs[(index,)] = [["tt.divisibility", 16]]
    source = ASTSource(kernel, signature, constexprs, attrs)
    options = {"num_warps": 4, **given}
    compiled = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
    registers, spills = _resources(compiled.asm["cubin"])
    variant = launch.variant + (" split" if constexprs.get("SPLIT") else "")
    target, num_warps = f"sm_{capability}", compiled.metadata.num_warps
    return Compiled(launch.kernel, variant, target, num_warps, registers, compiled.metadata.shared, spills)


def _type_of(value: object) -> str:
    if isinstance(value, torch.Tensor):
        integers = {torch.uint8: "u8", torch.int32: "i32", torch.int64: "i64"}
        return "*" + (integers.get(value.dtype) or _name(value.dtype))
    if isinstance(value, float):
        return "fp32"
    if isinstance(value, int):
        return "i32" if -(2**31) <= value < 2**31 else "i64"
    raise TypeError(f"no Triton type for {value!r}")


def _resources(cubin: bytes) -> tuple[int, int]:
    """(registers, bytes of local memory) per thread: without arrays in a kernel, local memory is spills."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [knobs.nvidia.cuobjdump.path, "--dump-resource-usage", file.name]
        said = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+).* LOCAL:(\d+)", said)
    if found is None:
        raise SystemExit(f"cuobjdump does not tell the registers: {said.strip()[-300:]}")
    registers, stack, local = map(int, found.groups())
    return registers, max(stack, local)


_jobs: list[tuple[Launch, int]] = []


def compile_all(jobs: list[tuple[Launch, int]]) -> Iterator[Compiled]:
    """In order, one process a core; forked, since a launch cannot be sent."""
    _jobs[:] = jobs
    with multiprocessing.get_context("fork").Pool(len(os.sched_getaffinity(0))) as pool:
        yield from pool.imap(_compile_job, range(len(jobs)))


def _compile_job(index: int) -> Compiled:
    return compile_launch(*_jobs[index])


def fits(compiled: Compiled) -> bool:
    return compiled.spills == 0 and compiled.shared <= SHARED_LIMIT


def _print(rows: list[Compiled]) -> None:
    table = Table("kernel", "variant", "target", "warps", "registers", "shared KiB", "spills B")
    for row in rows:
        table.add_row(
            row.kernel,
            row.variant,
            row.target,
            str(row.num_warps),
            str(row.registers),
            f"{row.shared / 1024:.1f}",
            str(row.spills),
            style=None if fits(row) else "red",
        )
    Console(width=110).print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description="Compile the Triton kernels for CUDA targets.")
    parser.add_argument("--targets", default=",".join(map(str, TARGETS)), help="numbers of sm_ targets")
    parser.add_argument("--kernels", default=",".join(KERNELS), help="some of the default")
    parser.add_argument("--only", default="", help="variants that contain this text")
    parser.add_argument("--json", action="store_true", help="one JSON object a line instead of the table")
    options = parser.parse_args()
    chosen = [
        launch
        for launch in launches()
        if launch.kernel in options.kernels.split(",") and options.only in launch.variant
    ]
    rows = []
    for row in compile_all([(launch, int(t)) for launch in chosen for t in options.targets.split(",")]):
        rows.append(row)
        if options.json:
            print(json.dumps(asdict(row)), flush=True)
    if not options.json:
        _print(rows)
    bad = [row for row in rows if not fits(row)]
    if bad:
        sys.exit(f"{len(bad)} of {len(rows)} compiled kernels spill or need over {SHARED_LIMIT // 1024} KiB")


if __name__ == "__main__":
    main()
