"""Tiers over a pool on the device: gathered, landed in pinned memory, written back."""

from __future__ import annotations

import asyncio

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("there is no CUDA device", allow_module_level=True)

from engine.kernels.triton.kernels import TritonKernels
from kvtransfer.device_region import DeviceRegion
from kvtransfer.tier_pool import DevicePool
from kvtransfer.tier_stack import TierStack

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(600)]

NBYTES, NUM_BLOCKS = 2**20, 32


@pytest.mark.parametrize("staging_blocks", [1, 4, NUM_BLOCKS])
async def test_blocks_survive_the_next_step_and_come_back(staging_blocks: int) -> None:
    """1. Blocks are committed.  2. The pool is overwritten at once, on the computation's stream.  3. They are in host
    RAM as they were, and are loaded into other blocks."""
    blocks = torch.randint(0, 256, (NUM_BLOCKS, NBYTES), dtype=torch.uint8, device="cuda")
    want = blocks.cpu()
    pool = DevicePool(DeviceRegion(blocks, "life"), TritonKernels(), 2 * staging_blocks * NBYTES)
    stack = TierStack(pool, NUM_BLOCKS * NBYTES)
    hashes = [bytes([i]) * 32 for i in range(NUM_BLOCKS)]
    stack.committed(hashes, range(NUM_BLOCKS))
    blocks.zero_()
    async with asyncio.timeout(10):
        while stack.host.lookup(hashes) < NUM_BLOCKS:
            await asyncio.sleep(0.001)
    back = list(reversed(range(NUM_BLOCKS)))
    assert await stack.load("host", hashes, back, lambda count: None) == NUM_BLOCKS
    assert torch.equal(blocks.cpu(), want.flip(0))
    await stack.close()
    stack.host.check()
