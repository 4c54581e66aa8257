"""The group of ranks that compute one model together (tensor parallelism, Shoeybi et al. 2019).

    rank 0    scheduler, sampler  --- each step's batch --->  ranks 1 .. t-1
    all       the same step, each on its own heads, with two sums a layer over the group
    rank 0    <--- columns of the logits ---  ranks 1 .. t-1

A step that began in one rank must end in all: after an error nobody knows which sums are still open, so
there is no next step, only a new worker.
"""

from __future__ import annotations

import socket
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed
import torch.nn.functional as F

from core.errors import ConfigError, WorkerLost
from engine.kernels.int8 import PANEL

_dist: Any = torch.distributed  # its stubs lack what its modules have

_CPU = torch.device("cpu")
HOST = "127.0.0.1"
"""Ranks share a host: they map the same pool and the same file of weights."""


def vocabulary_share(vocab_size: int, degree: int) -> int:
    """Rows of the LM head in each rank; the last ranks may have fewer, or none."""
    return -(-vocab_size // (degree * PANEL)) * PANEL


class Meeting:
    """Where the ranks find each other: a key-value store in rank 0's process, on a port of loopback."""

    def __init__(self, timeout_s: float, port: int = 0) -> None:
        """Opens a store, or reaches the one on `port`. Raises WorkerLost when nobody answers there, and
        ConfigError with a torch that was built without torch.distributed."""
        if not _dist.is_available():
            raise ConfigError("--tensor-parallel-size needs a torch that was built with torch.distributed")
        how: dict[str, Any] = {"timeout": timedelta(seconds=timeout_s), "wait_for_workers": False}
        if not port:
            listener = socket.create_server((HOST, 0))
            port = listener.getsockname()[1]
            how |= {"is_master": True, "master_listen_fd": listener.detach()}
        self.port = port
        self.store: Any = _translated(lambda: _dist.TCPStore(HOST, port, **how))


class Group:
    """One rank's end of a group: over Gloo for tensors in host memory, over NCCL for those on a GPU.

    All ranks make the same calls in the same order, each on one thread. It belongs to no global group.

    Over Gloo every call raises WorkerLost when a rank ended, or did not come within `timeout_s`; then the
    group is of no more use. Over NCCL a call is queued on the current stream, behind the kernels before it,
    and returns at once: a rank that is gone shows as a stream that never ends. NCCL's watchdog ends this
    process after `timeout_s`; whoever leads the ranks ends it sooner, when it sees that one is gone.
    """

    def __init__(
        self, meeting: Meeting, rank: int, degree: int, timeout_s: float, device: torch.device = _CPU
    ) -> None:
        """Waits for the others, at most `timeout_s` seconds. `device`: of all tensors; a GPU of its own."""
        self.rank, self.degree = rank, degree
        self._device = device
        self._store = meeting.store  # lives as long as the group
        build = _build_nccl if device.type == "cuda" else _build_gloo
        limit = timedelta(seconds=timeout_s)
        self._group: Any = _translated(lambda: build(meeting.store, rank, degree, limit))
        if device.type == "cuda":
            self.barrier()  # which makes NCCL meet: it costs seconds, and no step's time
            torch.cuda.synchronize(device)

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """The sum of the ranks' tensors, in each rank; written over `x`."""
        options = _dist.AllreduceOptions()
        options.asyncOp = False  # NCCL works on the current stream then, and no other waits for this one
        _translated(lambda: self._group.allreduce([x], options).wait())
        return x

    def barrier(self) -> None:
        """Until every rank has come here; over NCCL what is queued behind it waits, not the caller."""
        self.all_reduce(torch.zeros(1, device=self._device))

    def join(self, part: torch.Tensor, width: int) -> torch.Tensor:
        """Rank 0 gets [R, width], the ranks' columns side by side, `vocabulary_share` from each. What others
        get means nothing."""
        each = vocabulary_share(width, self.degree)
        part = F.pad(part, (0, each - part.shape[1]))
        parts = [torch.empty_like(part) for _ in range(self.degree)] if self.rank == 0 else []
        options = _dist.GatherOptions()
        options.rootRank, options.asyncOp = 0, False
        _translated(lambda: self._group.gather([parts] if parts else [], [part], options).wait())
        return torch.cat(parts, 1)[:, :width].contiguous() if parts else part


def _build_gloo(store: Any, rank: int, degree: int, limit: timedelta) -> Any:
    options = _dist.ProcessGroupGloo._Options()
    options._devices = [_dist.ProcessGroupGloo.create_device(hostname=HOST)]
    options._timeout = limit
    options._threads = 1
    return _dist.ProcessGroupGloo(store, rank, degree, options)


def _build_nccl(store: Any, rank: int, degree: int, limit: timedelta) -> Any:
    if not _dist.is_nccl_available():
        raise ConfigError("--tensor-parallel-size on GPUs needs a torch that was built with NCCL")
    options = _dist.ProcessGroupNCCL.Options()
    options._timeout = limit
    return _dist.ProcessGroupNCCL(store, rank, degree, options)


def _translated(call: Callable[[], Any]) -> Any:
    """torch raises RuntimeError of many kinds for a rank that is gone or late."""
    try:
        return call()
    except RuntimeError as error:
        reason = "a tensor-parallel rank of this worker ended or did not answer in time; try again"
        raise WorkerLost(reason) from error
