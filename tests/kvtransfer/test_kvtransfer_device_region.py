"""A region over a tensor that the engine allocated; on a CPU here, on a GPU in benchmarks.gpu."""

from __future__ import annotations

import pytest
import torch

from kvtransfer.checksum import checksum
from kvtransfer.device_region import DeviceRegion


@pytest.fixture
def blocks() -> torch.Tensor:
    return torch.arange(4 * 64, dtype=torch.uint8).view(4, 64)


def test_a_block_is_a_copy_in_host_memory(blocks: torch.Tensor) -> None:
    region = DeviceRegion(blocks, "life")
    copy = region.block(2)
    assert bytes(copy) == bytes(range(128, 192))
    assert copy.readonly
    blocks[2] = 0
    assert copy[0] == 128
    assert checksum(region.block(2)) == checksum(bytes(64))
    with pytest.raises(IndexError, match="block 4 of a pool of 4"):
        region.block(4)


def test_what_transports_ask_of_it(blocks: torch.Tensor) -> None:
    region = DeviceRegion(blocks, "life")
    assert (region.num_blocks, region.block_nbytes, region.memory) == (4, 64, "VRAM")
    assert region.address == blocks.data_ptr()
    kept = region.keep()
    region.close()
    region.close()
    assert kept is blocks
    with pytest.raises(ValueError, match="closed"):
        region.block(0)
    with pytest.raises(ValueError, match="block by block"):
        region.data  # noqa: B018
