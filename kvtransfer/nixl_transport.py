"""NIXL over UCX: reads between hosts, and between processes that share no memory.

What was measured and shapes this file (nixl 1.5, UCX, DRAM): on one host UCX reads through CMA and
the whole READ happens inside the posting call (GIL released), so it belongs on the transfer thread;
over TCP it is asynchronous. A peer that dies raises nixlRemoteDisconnectError at the next look.
Releasing a handle in flight succeeds, and the bytes still arrive later; removing its agent ends only
our knowledge of it. So a handle is kept until its state says that it ended.
"""

from __future__ import annotations

import importlib
import os
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from core.errors import ConfigError, PeerLost
from core.log import get
from kvtransfer.nixl_agent import DRIVE_S, drive, new_agent
from kvtransfer.offers import NixlOffer, decode, encode, require_same_blocks
from kvtransfer.region import Region
from kvtransfer.transport import ReadPending, require_pairs

_POLL_S = (50e-6, 1e-3)  # first and longest pause between looks at a transfer
_QUIET_LOGS = {"NIXL_LOG_LEVEL": "FATAL", "UCX_LOG_LEVEL": "fatal"}

log = get("kvtransfer")


def load_nixl() -> Any:
    """NIXL's API module. Its libraries write to stdout and stderr what we raise; unless the
    environment says otherwise they are silenced. Raises ConfigError when it is not installed."""
    for name, level in _QUIET_LOGS.items():
        os.environ.setdefault(name, level)
    try:
        return importlib.import_module("nixl._api")
    except ImportError as error:
        raise ConfigError(
            f"--transport nixl needs NIXL, which cannot be loaded ({error}); install it with "
            "`pip install --no-deps nixl nixl-cu12`, or use --transport shm on one host"
        ) from None


class NixlTransport:
    """One NIXL agent for the worker's region, started by the first `offer` or `connect` (about a
    second and 140 MB of process memory, most of it for loading the library).

    A lock keeps the agent to one thread at a time. UCX keeps one socket for each connection that was
    given up until either process ends, so do not reconnect to a living peer without need.
    """

    name = "nixl"

    def __init__(self, region: Region, worker_id: str) -> None:
        self._region = region
        self._agent_name = f"{worker_id}/{region.incarnation}"
        self.memory = region.memory
        self.device = region.device
        self.lock = threading.Lock()
        self._agent: Any = None
        self._registered: Any = None
        self._kept: object = None  # keeps the memory mapped for as long as NIXL may use it
        self._pools: dict[str, NixlPool] = {}

    def offer(self) -> bytes:
        """Raises ConfigError when NIXL is missing or cannot use this memory."""
        with self.lock:
            metadata: bytes = self._started().get_agent_metadata()
        return encode(
            NixlOffer(
                agent=self._agent_name,
                metadata=metadata.hex(),
                address=self._region.address,
                memory=self.memory,
                device=self.device,
                incarnation=self._region.incarnation,
                num_blocks=self._region.num_blocks,
                block_nbytes=self._region.block_nbytes,
            )
        )

    def connect(self, offer: bytes) -> NixlPool:
        """Load the peer's metadata and describe both pools to NIXL, a descriptor per block.

        Raises PeerLost (also while a read of an earlier connection is in flight), IncompatiblePeer.
        """
        peer = decode(offer, NixlOffer)
        require_same_blocks(peer, self._region)
        with self.lock:
            agent = self._started()
            earlier = self._pools.get(peer.agent)
            if earlier is not None:
                earlier.give_up()
            if peer.agent in self._pools:
                raise PeerLost(f"a read of an earlier connection to {peer.agent} is still in flight")
            try:
                agent.add_remote_agent(bytes.fromhex(peer.metadata))
                pool = NixlPool(self, agent, self._region, peer)
            except Exception as error:
                raise PeerLost(f"NIXL cannot reach {peer.agent}: {_text(error)}") from error
            self._pools[peer.agent] = pool
            return pool

    def forget(self, agent_name: str) -> None:
        """A pool has ended (lock held): disconnect."""
        del self._pools[agent_name]
        try:
            self._agent.remove_remote_agent(agent_name)
        except Exception as error:
            log.warning("nixl.agent_kept", peer=agent_name, error=_text(error))

    def close(self) -> None:
        """Give up all connections; memory stays registered while a read is in flight. Idempotent."""
        with self.lock:
            for pool in list(self._pools.values()):
                pool.give_up()
            if self._agent is None or self._pools:
                return
            self._agent.deregister_memory(self._registered)
            self._agent = self._registered = self._kept = None

    def _started(self) -> Any:
        if self._agent is not None:
            return self._agent
        api, region = load_nixl(), self._region
        region.bind_thread()
        driven = self.memory == "VRAM"
        try:
            agent = new_agent(api, self._agent_name, own_thread=not driven)
            whole = (region.address, region.num_blocks * region.block_nbytes, self.device, "")
            self._registered = agent.register_memory([whole], self.memory)
        except Exception as error:
            raise ConfigError(
                f"NIXL cannot serve the KV pool ({_text(error)}); use --transport shm on one host"
            ) from error
        self._agent, self._kept = agent, region.keep()
        if driven:
            threading.Thread(target=self._drive, args=(agent,), name="nixl", daemon=True).start()
        return agent

    def _drive(self, agent: Any) -> None:
        """Let the agent work until it is given up: see `new_agent`."""
        self._region.bind_thread()
        while True:
            with self.lock:
                if self._agent is not agent:
                    return
                drive(agent)
            time.sleep(DRIVE_S)


@dataclass(eq=False, slots=True)
class _Read:
    """One READ in flight; `error` says how it ended badly."""

    handle: Any
    ended: bool = False
    error: PeerLost | None = None


class NixlPool:
    """A connected agent's blocks. All calls but `give_up` take the transport's lock."""

    def __init__(self, transport: NixlTransport, agent: Any, region: Region, peer: NixlOffer) -> None:
        self.local = region
        self._transport = transport
        self._agent = agent
        self._peer = peer
        self._closed = False
        self._pending: list[_Read] = []  # posted and not ended, also while `read` waits for one
        ours = _descriptors(region.address, region.num_blocks, region.block_nbytes, transport.device)
        theirs = _descriptors(peer.address, peer.num_blocks, peer.block_nbytes, peer.device)
        self._ours: Any = agent.prep_xfer_dlist("NIXL_INIT_AGENT", ours, transport.memory)
        self._theirs: Any = agent.prep_xfer_dlist(peer.agent, theirs, peer.memory)

    def read(self, remote_ids: Sequence[int], local_ids: Sequence[int], timeout_s: float) -> None:
        """One READ of all blocks. Raises PeerLost, or ReadPending when it still runs at the deadline."""
        require_pairs(remote_ids, local_ids, self._peer.num_blocks, self.local.num_blocks)
        deadline = time.monotonic() + timeout_s
        self.local.bind_thread()
        with self._transport.lock:
            if self._closed:
                raise PeerLost("the connection to this peer was closed; connect again")
            self._drain()
            if self._pending:
                raise PeerLost(f"an earlier read from {self._peer.agent} is still in flight")
            read = self._post(remote_ids, local_ids)
        pause, longest = _POLL_S
        while not read.ended and time.monotonic() < deadline:
            time.sleep(pause)
            pause = min(2 * pause, longest)
            with self._transport.lock:
                self._look(read)
        if not read.ended:
            raise ReadPending(f"{self._peer.agent} did not deliver within {timeout_s:g} s")
        if read.error:
            raise read.error

    def drain(self) -> bool:
        with self._transport.lock:
            self._drain()
            if self._closed and not self._pending:
                self.give_up()
        return not self._pending

    def close(self) -> None:
        with self._transport.lock:
            self.give_up()

    def give_up(self) -> None:
        """Close with the transport's lock held; disconnects at once or with the last pending read."""
        self._closed = True
        self._drain()
        if self._pending or self._ours is None:
            return
        for descriptors in (self._ours, self._theirs):
            descriptors.release()
        self._ours = self._theirs = None
        self._transport.forget(self._peer.agent)

    def _post(self, remote_ids: Sequence[int], local_ids: Sequence[int]) -> _Read:
        ours, theirs = np.asarray(local_ids, np.int32), np.asarray(remote_ids, np.int32)
        handle = None
        try:
            handle = self._agent.make_prepped_xfer("READ", self._ours, ours, self._theirs, theirs)
            state = self._agent.transfer(handle)
        except Exception as error:
            self._release(handle)
            raise self._lost(error) from error
        read = _Read(handle)
        self._pending.append(read)
        self._note(read, state)
        return read

    def _look(self, read: _Read) -> None:
        """Ask NIXL how the read fares; whoever sees its end first, records it."""
        if read.ended:
            return
        try:
            state = self._agent.check_xfer_state(read.handle)
        except Exception as error:
            state, read.error = "ERR", self._lost(error)
        self._note(read, state)

    def _note(self, read: _Read, state: str) -> None:
        if state == "PROC":
            return
        if state != "DONE":
            read.error = read.error or self._lost(f"transfer state {state}")
        read.ended = True
        self._pending.remove(read)
        self._release(read.handle)

    def _drain(self) -> None:
        for read in list(self._pending):
            self._look(read)

    def _release(self, handle: Any) -> None:
        """Free an ended transfer's handle; NIXL keeps and retries what it cannot free."""
        if handle is not None:
            try:
                self._agent.release_xfer_handle(handle)
            except Exception as error:
                log.warning("nixl.handle_kept", peer=self._peer.agent, error=_text(error))

    def _lost(self, error: object) -> PeerLost:
        return PeerLost(f"reading from {self._peer.agent} failed: {_text(error)}; the peer or link is gone")


def _descriptors(address: int, num_blocks: int, block_nbytes: int, device: int) -> np.ndarray:
    """uint64 `[num_blocks, 3]`: address, length in bytes and device of each block."""
    table = np.empty((num_blocks, 3), np.uint64)
    table[:, 0] = np.arange(num_blocks, dtype=np.uint64) * np.uint64(block_nbytes) + np.uint64(address)
    table[:, 1] = block_nbytes
    table[:, 2] = device
    return table


def _text(error: object) -> str:
    return f"{type(error).__name__}: {error}" if isinstance(error, Exception) else str(error)
