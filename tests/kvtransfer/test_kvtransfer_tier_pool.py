"""Pools as tiers see them: one block of the whole model, whatever memory it is spread over."""

from __future__ import annotations

import threading

import pytest
import torch
from stack_blocks import key, until

from core.kv import KVLayout
from engine.kernels.torch_kernels import TorchKernels
from engine.kv_cache import KVCache
from kvtransfer.device_region import DeviceRegion
from kvtransfer.region import Region
from kvtransfer.slices import heads_of, rank_layout
from kvtransfer.tier_pool import DevicePool, RankPool, RegionPool, TierPool
from kvtransfer.tier_stack import TierStack

NUM_BLOCKS = 8
PLAIN = KVLayout(4, 6, 16, 8, "fp32")
BANDS = KVLayout(4, 6, 16, 8, "int8", skip_layers=(0, 3))


def noise(*shape: int) -> torch.Tensor:
    return torch.randint(0, 256, shape, dtype=torch.uint8)


class Split:
    """`whole`: blocks of a model, uint8 [NUM_BLOCKS, block_nbytes], held by `degree` ranks."""

    def __init__(self, layout: KVLayout, degree: int) -> None:
        self.whole = KVCache(layout, NUM_BLOCKS)
        self.whole.raw.copy_(noise(*self.whole.raw.shape))
        own = rank_layout(layout, degree)
        self.regions = [Region.create(NUM_BLOCKS, own.block_nbytes, f"life/{rank}") for rank in range(degree)]
        self.parts = [KVCache(own, NUM_BLOCKS, region.data) for region in self.regions]
        for rank, part in enumerate(self.parts):
            heads = list(heads_of(layout.num_kv_heads, degree, rank))
            for layer in range(layout.num_layers):
                for ours, all_of in ((part.keys, self.whole.keys), (part.values, self.whole.values)):
                    ours(layer).numbers.copy_(all_of(layer).numbers[heads])
                    if (scales := ours(layer).scales) is not None:
                        scales.view(torch.int16).copy_(all_of(layer).scales[heads].view(torch.int16))
        self.pool = RankPool(layout, self.regions, TorchKernels())

    def close(self) -> None:
        for region in self.regions:
            region.close()


def slots(count: int, nbytes: int) -> list[memoryview]:
    return [memoryview(bytearray(nbytes)) for _ in range(count)]


@pytest.mark.parametrize("degree", [1, 2, 3, 6])
@pytest.mark.parametrize("layout", [PLAIN, BANDS], ids=["plain", "bands"])
def test_what_ranks_hold_is_the_whole_models_block(layout: KVLayout, degree: int) -> None:
    """Of every degree the same bytes, so that workers of different ones share a tier."""
    split, ids = Split(layout, degree), [5, 0, 7]
    read = slots(3, layout.block_nbytes)
    assert split.pool.read(ids, read) is None
    assert [bytes(each) for each in read] == [split.whole.raw[i].numpy().tobytes() for i in ids]
    split.close()


@pytest.mark.parametrize("degree", [2, 3])
def test_a_block_goes_back_to_every_rank_and_nowhere_else(degree: int) -> None:
    split = Split(BANDS, degree)
    before = [part.raw.clone() for part in split.parts]
    split.pool.write([1, 4], [memoryview(split.whole.raw[i].numpy()).cast("B") for i in (6, 2)])
    for part, was in zip(split.parts, before, strict=True):
        was[1], was[4] = was[6], was[2]
        assert torch.equal(part.raw, was)
    split.close()


def test_a_region_is_copied_as_it_is() -> None:
    region = Region.create(4, 64, "life")
    region.block(2)[:] = bytes(range(64))
    pool, read = RegionPool(region), slots(1, 64)
    assert pool.read([2], read) is None
    pool.write([3], read)
    assert bytes(region.block(3)) == bytes(range(64))
    with pytest.raises(ValueError, match="64 bytes cannot fill a buffer of 63"):
        pool.read([2], slots(1, 63))
    region.close()


def device_pool(staging_blocks: int) -> tuple[torch.Tensor, DevicePool]:
    """In the CPU's memory: the same code, but for streams and pinning."""
    blocks = noise(NUM_BLOCKS, 256)
    return blocks, DevicePool(DeviceRegion(blocks, "life"), TorchKernels(), 2 * staging_blocks * 256)


@pytest.mark.parametrize("staging_blocks", [1, 2, 8])
def test_a_device_gives_blocks_through_its_staging(staging_blocks: int) -> None:
    blocks, pool = device_pool(staging_blocks)
    want, read = blocks.clone(), slots(5, 256)
    landing = pool.read([7, 1, 2, 0, 5], read)
    blocks.zero_()  # the next step writes
    landing()
    assert [bytes(each) for each in read] == [want[i].numpy().tobytes() for i in (7, 1, 2, 0, 5)]
    pool.write([3, 4], read[:2])
    assert torch.equal(blocks[[3, 4]], want[[7, 1]])
    assert not blocks[:3].any()


class LatePool(RegionPool):
    """Its copies land when they are told to, as a GPU's do, or fail."""

    def __init__(self, region: Region) -> None:
        super().__init__(region)
        self.lands = threading.Event()
        self.fails = False

    def read(self, block_ids, into):
        super().read(block_ids, into)

        def landing() -> None:
            assert self.lands.wait(10)
            if self.fails:
                raise RuntimeError("the device is gone")

        return landing


@pytest.mark.parametrize("fails", [False, True])
async def test_a_block_is_found_once_its_copy_has_landed(fails: bool) -> None:
    """1. Blocks are committed and on their way.  2. Nobody finds them.  3. They land, or fail: then their slots are
    free again."""
    region = Region.create(4, 64, "life")
    pool = LatePool(region)
    pool.fails = fails
    stack = TierStack(pool, 4 * 64)
    stack.committed([key(0), key(1)], [0, 1])
    assert await stack.lookup([key(0), key(1)]) == []
    assert stack.host.num_free == 2
    stack.host.check()
    pool.lands.set()
    await until(lambda: stack.host.num_free == 4 if fails else stack.host.holds(key(1)))
    assert stack.host.stats().store_nbytes == (0 if fails else 2 * 64)
    assert sum(each.count for each in await stack.lookup([key(0), key(1)])) == (0 if fails else 2)
    await stack.close()
    stack.host.check()
    region.close()


async def test_a_pool_is_told_which_memory_to_pin() -> None:
    class Pinned(RegionPool):
        nbytes = 0

        def pin(self, memory: memoryview) -> None:
            self.nbytes = memory.nbytes

    region = Region.create(2, 64, "life")
    pool: TierPool = Pinned(region)
    stack = TierStack(pool, 5 * 64 + 7)
    assert pool.nbytes == 5 * 64
    await stack.close()
    region.close()
