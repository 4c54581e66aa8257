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
    """One rank's end of a group over Gloo, for tensors in host memory.

    All ranks make the same calls in the same order, each on one thread. It belongs to no global group. Every
    call raises WorkerLost when a rank ended, or did not come within `timeout_s`; then the group is of no
    more use.
    """

    def __init__(self, meeting: Meeting, rank: int, degree: int, timeout_s: float) -> None:
        """Waits for the others, at most `timeout_s` seconds."""
        self.rank, self.degree = rank, degree
        options = _dist.ProcessGroupGloo._Options()
        options._devices = [_dist.ProcessGroupGloo.create_device(hostname=HOST)]
        options._timeout = timedelta(seconds=timeout_s)
        options._threads = 1
        self._store = meeting.store  # lives as long as the group
        self._group: Any = _translated(lambda: _dist.ProcessGroupGloo(meeting.store, rank, degree, options))

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """The sum of the ranks' tensors, in each rank; written over `x`."""
        _translated(lambda: self._group.allreduce([x]).wait())
        return x

    def barrier(self) -> None:
        """Until every rank has come here."""
        self.all_reduce(torch.zeros(1))

    def join(self, part: torch.Tensor, width: int) -> torch.Tensor:
        """Rank 0 gets [R, width], the ranks' columns side by side, `vocabulary_share` from each. What others
        get means nothing."""
        each = vocabulary_share(width, self.degree)
        part = F.pad(part, (0, each - part.shape[1]))
        parts = [torch.empty_like(part) for _ in range(self.degree)] if self.rank == 0 else []
        options = _dist.GatherOptions()
        options.rootRank = 0
        _translated(lambda: self._group.gather([parts] if parts else [], [part], options).wait())
        return torch.cat(parts, 1)[:, :width].contiguous() if parts else part


def _translated(call: Callable[[], Any]) -> Any:
    """torch raises RuntimeError of many kinds for a rank that is gone or late."""
    try:
        return call()
    except RuntimeError as error:
        reason = "a tensor-parallel rank of this worker ended or did not answer in time; try again"
        raise WorkerLost(reason) from error
