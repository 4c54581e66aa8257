"""A tiny Llama on the device: eager and as captured graphs, blocks copied to the host, the pool's account."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("there is no CUDA device", allow_module_level=True)

from tiny_llama import TinyCheckpoint, dense_logits, layout_of, scattered_tables, tiny_config

from core.settings import Settings
from engine.batch import Chunk
from engine.kernels.triton.kernels import TritonKernels
from engine.models.llama import Llama
from engine.models.rope import rope_frequencies
from engine.models.weights import load_weights
from engine.step import Limits
from kvtransfer.device_region import DeviceRegion
from services.worker.pool import Pool, make_pool

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(600)]

DEVICE = torch.device("cuda", 0)
IDS = [int(i) for i in torch.randint(97, (60,), generator=torch.Generator().manual_seed(1))]


@pytest.fixture(params=[False, True], ids=["graphs", "eager"])
def pool(request: pytest.FixtureRequest, tmp_path: Path) -> Pool:
    config = tiny_config()
    weights = load_weights(TinyCheckpoint(config), "fp32", tmp_path)
    model = Llama(config, {name: w.to(DEVICE) for name, w in weights.items()}, TritonKernels(), 512)
    settings = Settings.model_validate({"enforce_eager": request.param, "gpu_memory_utilization": 0.1})
    limits = Limits(16, 512, 4, 64, 8)
    return make_pool(settings, model, layout_of(config), limits, DEVICE, "life")


def test_prefill_and_decodes_give_the_oracles_logits(pool: Pool) -> None:
    want = dense_logits(TinyCheckpoint(tiny_config()), IDS, rope_frequencies(tiny_config()))
    lengths, runner = (40, 17, 31), pool.runner
    assert not runner.cache.pool[0].any()
    tables = scattered_tables([n + 2 for n in lengths], 16, 128)
    got = runner.run_chunks([Chunk(IDS[:n], 0, t, 0) for n, t in zip(lengths, tables, strict=True)])
    torch.testing.assert_close(got.cpu(), torch.cat([want[:n] for n in lengths]), rtol=1e-3, atol=1e-3)
    for ahead in (0, 1):
        steps = [Chunk([IDS[n + ahead]], n + ahead, t, 0) for n, t in zip(lengths, tables, strict=True)]
        rows = want[[n + ahead for n in lengths]]
        torch.testing.assert_close(runner.run_chunks(steps).cpu(), rows, rtol=1e-3, atol=1e-3)


def test_the_pool_is_within_its_share(pool: Pool) -> None:
    free, total = torch.cuda.mem_get_info(DEVICE)
    assert 0 < pool.activations_nbytes < 2**30
    assert pool.runner.cache.raw.nbytes < 0.1 * total
    assert free > 0


def test_a_block_comes_to_the_host(pool: Pool) -> None:
    assert isinstance(pool.regions[0], DeviceRegion)
    raw = pool.runner.cache.raw
    raw[3] = torch.arange(raw.shape[1], device=DEVICE).to(torch.uint8)
    torch.cuda.synchronize()
    assert bytes(pool.regions[0].block(3)) == bytes(i % 256 for i in range(raw.shape[1]))
