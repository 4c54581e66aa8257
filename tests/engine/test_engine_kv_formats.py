"""KV pools of fewer bits: what is stored, attention over it by every CPU kernel set against the twins, and a model."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch
from kernel_sets import native_kernels
from tiny_llama import layout_of, run_chunks, scattered_tables, tiny_config, tiny_runner

from core.blocks import num_blocks_for
from core.kv import BLOCK_SIZES, KVLayout
from engine.batch import Batch, Chunk
from engine.kernels import reference
from engine.kernels.interface import Kernels
from engine.kernels.torch_kernels import TorchKernels
from engine.kv_cache import KVCache
from engine.kv_numbers import dequantize, quantize, saturated

pytest_plugins = ["kernel_sets"]

KV_DTYPES = ["fp8_e4m3", "fp8_e5m2", "int8", "k8v4"]
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
TOLERANCE = {"fp32": 2e-5, "bf16": 2e-2}
NUM_CASES = 120


def make_kernels(name: str, window: int = 0) -> Kernels:
    if name == "torch":
        return TorchKernels(window)
    return native_kernels(window) or pytest.skip("no C compiler")


# ---- numbers


@pytest.mark.parametrize(("number_format", "steps"), [("int8", 254), ("int4", 15)])
def test_numbers_come_back_to_half_a_step(number_format: str, steps: int) -> None:
    torch.manual_seed(0)
    x = torch.randn(200, 64) * torch.logspace(-6, 6, 200)[:, None]
    x[0], x[1], x[2] = 0.0, x[1].abs(), -x[2].abs()
    back = dequantize(*quantize(x, number_format))
    if number_format == "int8":
        width = 2 * x.abs().amax(-1)
    else:
        width = x.amax(-1).clamp(min=0) - x.amin(-1).clamp(max=0)
    # The scale is rounded to bf16, so the largest numbers may be cut a bit; zeros are whole, at most half a step off.
    assert ((back - x).abs() <= (width / steps * (0.51 if steps > 15 else 1.04))[:, None]).all()
    assert not back[0].any()


def test_bytes_of_a_token_are_as_documented() -> None:
    x = torch.arange(-3.0, 13.0)
    packed, scales, zeros = quantize(x, "int4")
    assert (float(scales), int(zeros)) == (1.0, 48)  # type: ignore[arg-type]
    assert packed.tolist() == [j | (j + 8) << 4 for j in range(8)]
    numbers, scales, zeros = quantize(torch.tensor([254.0, -3.0, 3.0, 0.4]), "int8")
    assert (numbers.tolist(), float(scales), zeros) == ([127, -2, 2, 0], 2.0, None)


@pytest.mark.parametrize("number_format", ["int8", "int4"])
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_what_is_not_finite_is_not_hidden(number_format: str, bad: float) -> None:
    x = torch.ones(2, 32)
    x[1, 7] = bad
    back = dequantize(*quantize(x, number_format))
    torch.testing.assert_close(back[0], x[0], rtol=4e-3, atol=0)
    assert back[1].isnan().all()


def test_fp8_saturates() -> None:
    x = torch.tensor([1e9, -1e9, 460.0, 0.3, float("nan")])
    assert saturated(x, torch.float8_e4m3fn).float()[:4].tolist() == [448.0, -448.0, 448.0, 0.3125]
    assert saturated(x, torch.float8_e5m2).float()[:4].tolist() == [57344.0, -57344.0, 448.0, 0.3125]
    assert saturated(x, torch.float8_e5m2)[4].float().isnan()


# ---- kernels


class Case:
    """A random batch: the past of every sequence is in the pool, other bytes are 0xFF, NaN in every format.

    Rotations are by no angle, so that all sets round the same numbers.
    """

    def __init__(self, seed: int, kv_dtype: str, dtype: str) -> None:
        rng = random.Random(seed)
        torch.manual_seed(seed)
        self.num_kv_heads, group = rng.choice([1, 2, 3]), rng.choice([1, 2, 3, 5])
        head_dim, block_size = rng.choice([64, 80, 32, 128]), rng.choice(BLOCK_SIZES)
        self.num_heads, self.window = group * self.num_kv_heads, rng.choice([0, 0, 0, 7, 70])
        lengths = [(rng.choice([1, 1, 2, 9, 70]), rng.choice([0, 1, 17, 63, 150])) for _ in range(2)]
        needed = sum(num_blocks_for(sum(each), block_size) for each in lengths)
        layout = KVLayout(2, self.num_kv_heads, head_dim, block_size, kv_dtype, rng.choice([(), (0,)]))
        self.cache, self.twin = (KVCache(layout, needed + 1) for _ in range(2))
        self.cache.raw.fill_(0xFF)
        tables = scattered_tables([sum(each) for each in lengths], block_size, needed, seed)
        for table, (_, past) in zip(tables, lengths, strict=True):
            at = torch.arange(past)
            blocks, offsets = torch.tensor(table)[at // block_size], at % block_size
            for runs in (self.cache.keys(1), self.cache.values(1)):
                runs.store(torch.randn(past, self.num_kv_heads, head_dim), blocks, offsets)
        chunks = [Chunk([0] * new, past, t) for (new, past), t in zip(lengths, tables, strict=True)]
        self.batch = Batch.build(chunks, block_size)
        self.rope = torch.stack((torch.ones(512, head_dim // 2), torch.zeros(512, head_dim // 2)), 1)
        width = (self.num_heads + 2 * self.num_kv_heads) * head_dim
        scales = torch.logspace(-3, 0, self.batch.num_tokens).view(-1, 1)
        self.qkv = (torch.randn(self.batch.num_tokens, width) * scales).to(DTYPES[dtype])
        self.twin.raw.copy_(self.cache.raw)

    def want(self) -> torch.Tensor:
        """By the twins, on the twin of the pool."""
        heads = self.qkv.view(self.batch.num_tokens, -1, self.twin.layout.head_dim)
        q, k, v = heads.split([self.num_heads, self.num_kv_heads, self.num_kv_heads], 1)
        reference.write_kv(k, v, self.batch, self.twin, 1)
        return reference.attention(q, self.batch, self.twin, 1, self.window).flatten(1)

    def got(self, kernels: Kernels) -> torch.Tensor:
        qkv = self.qkv.clone()
        kernels.rope_and_store(qkv, self.rope, self.batch, self.cache, 1)
        return kernels.attention(qkv, self.cache, 1, kernels.plan(self.batch, self.cache))


@pytest.mark.parametrize("kv_dtype", KV_DTYPES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ["torch", "native"])
def test_the_pool_and_attention_are_their_twins(name: str, dtype: str, kv_dtype: str) -> None:
    for seed in range(NUM_CASES // 2):
        case = Case(seed, kv_dtype, dtype)
        want = case.want()
        got = case.got(make_kernels(name, case.window))
        assert torch.equal(case.cache.raw, case.twin.raw), f"seed {seed}: other bytes are stored"
        tolerance = TOLERANCE[dtype]
        torch.testing.assert_close(
            got.float(),
            want.float(),
            rtol=tolerance,
            atol=tolerance * max(1.0, float(want.abs().max())),
            msg=lambda m, seed=seed: f"seed {seed}: {m}",
        )


@pytest.mark.parametrize("kv_dtype", KV_DTYPES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_number_is_stored_as_torch_does(dtype: str, kv_dtype: str) -> None:
    """Codes and the middles between them, tiny, huge and equal ones, values of NaN and infinities."""
    kernels = make_kernels("native")
    torch.manual_seed(0)
    rows = torch.randn(600, 192) * torch.logspace(-42, 37, 600)[:, None]
    codes = (
        torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float().nan_to_num(0.0).sort().values
    )
    halves = torch.stack((codes, (codes + codes.roll(1)) / 2)).view(8, 64)
    rows[:8, 64:128] = rows[:8, 128:] = halves
    rows[8:16, 64:] = torch.arange(-4.0, 4.0)[:, None]
    for i, bad in enumerate((float("nan"), float("inf"), float("-inf"))):
        rows[16 + i, 150] = bad
    qkv = rows.to(DTYPES[dtype])
    batch = Batch.build([Chunk([0] * 600, 0, range(38))], 16)
    rope = torch.stack((torch.ones(600, 32), torch.zeros(600, 32)), 1)
    got, want = (KVCache(KVLayout(1, 1, 64, 16, kv_dtype), 38) for _ in range(2))
    heads = qkv.view(600, 3, 64)
    reference.write_kv(heads[:, 1:2], heads[:, 2:], batch, want, 0)
    kernels.rope_and_store(qkv.clone(), rope, batch, got, 0)
    finite = torch.ones(608, dtype=torch.bool)
    finite[16:19] = False
    for mine, theirs in ((got.keys(0), want.keys(0)), (got.values(0), want.values(0))):
        ours, other = (runs.load(torch.arange(38))[0].float() for runs in (mine, theirs))
        assert torch.equal(ours[finite], other[finite])
        assert torch.equal(ours.isnan(), other.isnan())


# ---- a model


PROMPT = random.Random(5).choices(range(97), k=200)
ERRORS = {"fp8_e4m3": 0.3, "fp8_e5m2": 0.55, "int8": 0.07, "k8v4": 0.4}
"""Of logits, root mean square next to that of an fp32 pool's; random weights make much of small differences."""


def logits(
    kernels: Kernels, folder: Path, kv_dtype: str, pieces: list[int], dtype: str = "fp32"
) -> torch.Tensor:
    runner = tiny_runner(kernels, folder, tiny_config(6, 2), block_size=8, dtype=dtype, kv_dtype=kv_dtype)
    (table,) = scattered_tables([len(PROMPT)], 8, runner.cache.num_blocks)
    rows, first = [], 0
    for size in pieces:
        rows.append(run_chunks(runner, Chunk(PROMPT[first : first + size], first, table, 0)).clone())
        first += size
    return torch.cat(rows)


@pytest.mark.parametrize("kv_dtype", KV_DTYPES)
def test_logits_are_close_to_those_of_an_fp32_pool(kernels: Kernels, kv_dtype: str, tmp_path: Path) -> None:
    exact, got = (logits(kernels, tmp_path, kv, [200]) for kv in ("fp32", kv_dtype))
    assert float((got - exact).norm() / exact.norm()) < ERRORS[kv_dtype]


@pytest.mark.parametrize("kv_dtype", KV_DTYPES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_chunks_change_nothing(kv_dtype: str, dtype: str, tmp_path: Path) -> None:
    """Bit for bit: a row attends to what is stored, that of its own chunk too."""
    kernels = make_kernels("native")
    whole = logits(kernels, tmp_path, kv_dtype, [200], dtype)
    assert torch.equal(logits(kernels, tmp_path, kv_dtype, [1, 70, 64, 1, 1, 63], dtype), whole)


@pytest.mark.parametrize("kv_dtype", KV_DTYPES)
def test_chunks_change_next_to_nothing_in_torch(kv_dtype: str, tmp_path: Path) -> None:
    kernels = TorchKernels()
    whole = logits(kernels, tmp_path, kv_dtype, [200])
    # Sums in another order may round a number to the next step, which is as far as formats are apart.
    difference = (logits(kernels, tmp_path, kv_dtype, [1, 70, 64, 1, 1, 63]) - whole).abs()
    assert float(difference.median() / whole.abs().max()) < 1e-3


def test_a_skipped_layer_holds_bf16() -> None:
    layout = KVLayout(3, 2, 32, 8, "int8", (1,))
    plain, eight = 2 * 8 * 32 * 2, 2 * 8 * (32 + 2)
    assert [layout.head_nbytes(i) for i in range(3)] == [eight, plain, eight]
    assert layout.block_nbytes == 2 * (plain + 2 * eight)
    cache = KVCache(layout, 3)
    x = torch.randn(1, 2, 32)
    for layer in range(3):
        cache.values(layer).store(x, torch.tensor([2]), torch.tensor([7]))
        back = cache.values(layer).load(torch.tensor([2]))[:, 7]
        assert torch.equal(back, x[0].bfloat16()) == (layer == 1)
    assert layout_of(tiny_config(), kv_dtype="int8").identity == "int8"
    assert layout.identity == "int8/skip=1"
