"""The KV pool in a GPU's memory, as transports and checksums see it.

The engine allocates it; peers reach it through NIXL (on one host UCX maps it over CUDA IPC) or NCCL, never
through shm. Bytes for checksums and tiers come to the host on a stream of their own, beside the computation.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from kvtransfer.region import Region


class Lane:
    """A stream of one device for copies beside the computation. On a CPU copies are over when they return."""

    def __init__(self, device: torch.device) -> None:
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    @contextmanager
    def beside(self) -> Iterator[None]:
        """Copies within are this lane's, and wait for nothing but each other."""
        if self.stream is None:
            yield
            return
        with torch.cuda.stream(self.stream):
            yield

    @contextmanager
    def behind(self) -> Iterator[None]:
        """`beside`, once what the current stream was given so far is done."""
        if self.stream is not None:
            self.stream.wait_stream(torch.cuda.current_stream(self.stream.device))
        with self.beside():
            yield

    def mark(self) -> Callable[[], None]:
        """Waits, on whatever thread, until the copies that the lane was given so far are done."""
        if self.stream is None:
            return lambda: None
        event = torch.cuda.Event(blocking=True)
        event.record(self.stream)
        return event.synchronize


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
        self._lane = Lane(blocks.device)
        self._lock = threading.Lock()

    def another(self, num_blocks: int, block_nbytes: int, incarnation: str) -> DeviceRegion:
        return DeviceRegion(self.blocks.new_zeros((num_blocks, block_nbytes)), incarnation)

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
        host = torch.empty(self.block_nbytes, dtype=torch.uint8, pin_memory=source.is_cuda)
        with self.aside():
            host.copy_(source, non_blocking=True)
        return host.numpy().data.toreadonly()

    def keep(self) -> object:
        return self.blocks

    @contextmanager
    def aside(self) -> Iterator[None]:
        with self._lock, self._lane.beside():
            yield
            self._lane.mark()()

    def bind_thread(self) -> None:
        """And the region's stream its current one, so that its copies do not queue behind the computation."""
        if self._lane.stream is not None:
            torch.cuda.set_device(self.device)
            torch.cuda.set_stream(self._lane.stream)

    def close(self) -> None:
        self._blocks = None
