"""Rank 0's side of a tensor-parallel worker: starts the other ranks, leads them, notices their end."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress

import torch

from core.errors import ConfigError, WorkerLost
from core.kv import KVLayout
from core.settings import ENV_PREFIX, Settings
from engine import batch_bytes
from engine.batch import Batch
from engine.parallel import Group, Meeting
from kvtransfer import device_share
from kvtransfer.device_region import DeviceRegion
from kvtransfer.region import Region
from services import orphan
from services.worker.rank_link import COPY, POOL, Kind, Link, Order, silence_limit_s

END_S = 5.0
"""How long a rank may take to end when it is asked to."""

_SOON_S = 0.001


class RankProcesses:
    """Ranks 1 .. degree - 1 of this worker, each a process; the `Followers` of its runner.

    Only the engine's thread calls `run` and `copy_block`.
    """

    def __init__(
        self, settings: Settings, layout: KVLayout, dtype: str, max_model_len: int, device: torch.device
    ) -> None:
        """Starts them. `layout`: the whole model's; `device`: rank 0's. Raises ConfigError without
        torch.distributed."""
        self.degree = settings.tensor_parallel_size
        self._settings, self._device = settings, device
        self._limit_s = silence_limit_s(settings, device.type)
        self._meeting = Meeting(self._limit_s)
        self._processes: list[subprocess.Popen[bytes]] = []
        self._links: list[Link] = []
        self._closed = False
        # No rank serves clients, and flags or an environment would show the key.
        order = Order(
            rank=0,
            settings=settings.model_copy(update={"api_key": "", "api_keys": ""}),
            dtype=dtype,
            kv_layout=layout,
            max_model_len=max_model_len,
            port=self._meeting.port,
        )
        for rank in range(1, self.degree):
            self._start(order.model_copy(update={"rank": rank}))

    def join(self) -> Group:
        """Wait until all have loaded, and meet them. Raises ConfigError when one gives up or is too slow."""
        self._answers("load", "while it loaded")
        self._tell(Kind.JOIN)
        return Group(self._meeting, 0, self.degree, self._limit_s, self._device)

    def use(self, regions: Sequence[Region]) -> None:
        """Each rank's pool in host memory, rank 0's first; until then they have one block of their own."""
        for link, region in zip(self._links, regions[1:], strict=True):
            link.send(Kind.POOL, POOL.pack(region.num_blocks), region.fd)

    def allocate(self, num_blocks: int, block_nbytes: int, incarnations: Sequence[str]) -> list[Region]:
        """The other ranks' pools, each allocated on its rank's GPU and mapped here.

        `incarnations`: of these, in order. Raises ConfigError when a rank has not the memory, or ended.
        """
        self._tell(Kind.POOL, POOL.pack(num_blocks))
        answers = self._answers("allocate its pool", "with its pool")
        return [
            DeviceRegion(device_share.opened(answer, num_blocks, block_nbytes), incarnation)
            for answer, incarnation in zip(answers, incarnations, strict=True)
        ]

    def run(self, batch: Batch) -> None:
        self._tell(Kind.RUN, batch_bytes.encode(batch))

    def copy_block(self, src: int, dst: int) -> None:
        self._tell(Kind.COPY, COPY.pack(src, dst))

    @property
    def pids(self) -> list[int]:
        return [process.pid for process in self._processes]

    @property
    def lost(self) -> str:
        """Which rank ended unasked, and how; empty while all live."""
        if self._closed:
            return ""
        ended = (rank for rank, p in enumerate(self._processes, start=1) if p.poll() is not None)
        return next(map(self._ending, ended), "")

    def close(self) -> None:
        """End them: kindly, then by force. Idempotent."""
        self._closed = True
        for link in self._links:
            link.close()
        deadline = time.monotonic() + END_S
        for process in self._processes:
            with suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, deadline - time.monotonic()))
        self.kill()

    def kill(self) -> None:
        """At once, also those that hang. Idempotent."""
        self._closed = True
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.wait(END_S)

    def _start(self, order: Order) -> None:
        ours, theirs = socket.socketpair()
        environment = {name: value for name, value in os.environ.items() if not name.startswith(ENV_PREFIX)}
        with theirs:
            process = subprocess.Popen(
                [sys.executable, "-m", "services.worker.rank", str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                start_new_session=True,  # Ctrl-C is rank 0's to hear: it drains first
                env=environment | {orphan.PARENT: str(os.getpid())},
            )
        link = Link(ours, self._settings.step_timeout_s)
        self._processes.append(process)
        self._links.append(link)
        link.send(Kind.START, order.model_dump_json().encode())

    def _tell(self, kind: Kind, body: bytes = b"") -> None:
        for link in self._links:
            link.send(kind, body)

    def _answers(self, task: str, when: str) -> list[bytes]:
        """Each rank's, while the worker starts. Raises ConfigError when one gives up or is too slow."""
        answers, limit_s = [], self._settings.start_timeout_s
        deadline = time.monotonic() + limit_s
        for rank, link in enumerate(self._links, start=1):
            try:
                frame = link.receive(max(_SOON_S, deadline - time.monotonic()))
            except WorkerLost:
                raise ConfigError(
                    f"tensor-parallel rank {rank} did not {task} within {limit_s:g} s; see the log above, or "
                    "raise --start-timeout-s"
                ) from None
            if frame is None:
                raise ConfigError(f"tensor-parallel {self._ending(rank)} {when}; see the log above")
            if frame.kind is Kind.FAILED:
                raise ConfigError(frame.body.decode())
            answers.append(bytes(frame.body))
        return answers

    def _ending(self, rank: int) -> str:
        """`rank 2 ended with signal 9`, of one whose socket or process is at its end."""
        process = self._processes[rank - 1]
        with suppress(subprocess.TimeoutExpired):
            process.wait(END_S)
        status = process.poll()
        if status is None:
            return f"rank {rank} fell silent"
        how = f"signal {-status} ({signal.Signals(-status).name})" if status < 0 else f"status {status}"
        return f"rank {rank} ended with {how}"
