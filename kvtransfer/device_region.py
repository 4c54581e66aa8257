"""The KV pool in a GPU's memory, as transports and checksums see it.

The engine allocates it; peers reach it through NIXL (on one host UCX maps it over CUDA IPC) or NCCL, never
through shm. Bytes for checksums and tiers come to the host on a stream of their own, beside the computation.
"""

from __future__ import annotations

import threading
from typing import Any

import torch

from kvtransfer.region import Region


class DeviceRegion(Region):
    """`blocks`: uint8 tensor `[num_blocks, block_nbytes]`, contiguous; the region holds it until `close`.

    Not mapped by anybody, so there is no descriptor (`fd` is -1). A tensor of the CPU works as well.
    """

    memory = "VRAM"

    def __init__(self, blocks: torch.Tensor, incarnation: str) -> None:
        self.num_blocks, self.block_nbytes = blocks.shape
        self.incarnation = incarnation
        self.pid, self.fd = -1, -1
        self.device = blocks.device.index or 0
        self._blocks: torch.Tensor | None = blocks
        self._stream = torch.cuda.Stream(blocks.device) if blocks.is_cuda else None
        self._lock = threading.Lock()

    @property
    def blocks(self) -> Any:
        """The tensor (where a `Region` has a numpy view)."""
        if self._blocks is None:
            raise ValueError("the region is closed")
        return self._blocks

    @property
    def data(self) -> memoryview:
        """Raises ValueError: no pointer of the host leads here."""
        raise ValueError("the pool is in GPU memory; read it block by block")

    @property
    def address(self) -> int:
        """Device address of block 0."""
        return self.blocks.data_ptr()

    def block(self, index: int) -> memoryview:
        """A read-only copy of one block in host memory; waits for that copy alone. Any thread may call it.

        Call it for blocks whose step is over: the copy does not wait for steps in flight.
        """
        if not 0 <= index < self.num_blocks:
            raise IndexError(f"block {index} of a pool of {self.num_blocks}")
        source = self.blocks[index]
        if self._stream is None:
            return source.clone().numpy().data.toreadonly()
        with self._lock, torch.cuda.stream(self._stream):
            host = torch.empty(self.block_nbytes, dtype=torch.uint8, pin_memory=True)
            host.copy_(source, non_blocking=True)
            self._stream.synchronize()
        return host.numpy().data.toreadonly()

    def keep(self) -> object:
        return self.blocks

    def bind_thread(self) -> None:
        if self._stream is not None:
            torch.cuda.set_device(self.device)

    def close(self) -> None:
        self._blocks = None
