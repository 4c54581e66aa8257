"""The memory of a worker's KV pool: one header page, then the blocks, in a Linux memfd.

    byte 0            PAGE_NBYTES                            + num_blocks * block_nbytes
    | header | zeros  | block 0 | block 1 | ...             |

A memfd has no name in any file system, so nothing is left behind after `kill -9`. It is sealed
against resizing, so a peer that mapped it can never be hit by SIGBUS. A peer on the same host maps
it read-only through `/proc/PID/fd/FD`; the mapping outlives the owner, so a mapped region says
nothing about whether its owner still lives or still means the blocks for us: leases say that.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import struct
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np

from core.errors import ConfigError, PeerLost
from kvtransfer.memory import available_nbytes

PAGE_NBYTES = mmap.PAGESIZE
_MAGIC = b"BATONKV\0"
_VERSION = 1
_NAME = "baton-kv"
_HEADER = struct.Struct("<8sIQQ64s")  # magic, version, num_blocks, block_nbytes, incarnation
_INCARNATION_NBYTES = 64
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW


class Region:
    """A mapped pool region, the owner's (`create`) or a peer's seen from here (`attach`).

    `data` spans all blocks as bytes; numpy and torch views made from it share the memory. `close`
    drops this object's hold; memory is unmapped when the last such view is gone.
    """

    memory = "DRAM"
    """What kind of memory NIXL is told that this is; `device` is the GPU's number when it is VRAM."""
    device = 0

    def __init__(
        self,
        mapping: mmap.mmap,
        num_blocks: int,
        block_nbytes: int,
        incarnation: str,
        pid: int,
        fd: int,
        *,
        owned: bool,
    ) -> None:
        self.num_blocks = num_blocks
        self.block_nbytes = block_nbytes
        self.incarnation = incarnation
        self.pid = pid
        self.fd = fd
        self._owned = owned
        self._mapping: mmap.mmap | None = mapping
        end = PAGE_NBYTES + num_blocks * block_nbytes
        self._data: memoryview | None = memoryview(mapping)[PAGE_NBYTES:end]

    @classmethod
    def create(cls, num_blocks: int, block_nbytes: int, incarnation: str) -> Region:
        """A new region of zeroed blocks, shared with whoever attaches.

        Raises ConfigError when this machine (or container) has not enough free memory for it.
        """
        if num_blocks < 1 or block_nbytes < 1:
            raise ConfigError(f"a KV pool of {num_blocks} blocks of {block_nbytes} bytes holds nothing")
        header = _pack(num_blocks, block_nbytes, incarnation)
        nbytes = PAGE_NBYTES + num_blocks * block_nbytes
        available = available_nbytes()
        if nbytes > available:
            raise _no_memory(nbytes, f"only {available / 2**20:,.0f} MiB are free")
        fd = os.memfd_create(_NAME, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(fd, nbytes)
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS)
            mapping = mmap.mmap(fd, nbytes)
        except OSError as error:
            os.close(fd)
            raise _no_memory(nbytes, f"the system says: {error.strerror}") from None
        mapping[: len(header)] = header
        return cls(mapping, num_blocks, block_nbytes, incarnation, os.getpid(), fd, owned=True)

    @classmethod
    def attach(cls, pid: int, fd: int, incarnation: str) -> Region:
        """Map a peer's region read-only.

        Raises PeerLost when that process is gone or cannot be seen from here, or when what stands
        behind its descriptor is not the region of that incarnation (the pid may have been reused).
        """
        path = f"/proc/{pid}/fd/{fd}"
        try:
            if os.readlink(path) != f"/memfd:{_NAME} (deleted)":  # to open a device or a pipe may do things
                raise PeerLost(f"descriptor {fd} of process {pid} is no KV pool: the pid was reused")
            ours = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY)
        except OSError as error:
            raise PeerLost(
                f"cannot open the KV pool of process {pid} ({error.strerror}): it ended, or runs as "
                "another user or in another container; if it lives, use --transport nixl"
            ) from None
        try:
            num_blocks, block_nbytes = _verify(ours, pid, incarnation)
            nbytes = PAGE_NBYTES + num_blocks * block_nbytes
            mapping = mmap.mmap(ours, nbytes, prot=mmap.PROT_READ, flags=mmap.MAP_SHARED)
        except OSError as error:
            raise PeerLost(f"cannot map the KV pool of process {pid}: {error.strerror}") from None
        finally:
            os.close(ours)
        return cls(mapping, num_blocks, block_nbytes, incarnation, pid, fd, owned=False)

    @classmethod
    def adopt(cls, fd: int, num_blocks: int, block_nbytes: int) -> Region:
        """Map for writing what another process of this worker created. The descriptor is closed."""
        try:
            mapping = mmap.mmap(fd, PAGE_NBYTES + num_blocks * block_nbytes)
        finally:
            os.close(fd)
        return cls(mapping, num_blocks, block_nbytes, "", os.getpid(), -1, owned=False)

    def another(self, num_blocks: int, block_nbytes: int, incarnation: str) -> Region:
        """A new region of the same kind of memory, the caller's to close. Raises ConfigError without room."""
        return Region.create(num_blocks, block_nbytes, incarnation)

    @property
    def data(self) -> memoryview:
        """All blocks, `num_blocks * block_nbytes` bytes; read-only in a peer's region."""
        if self._data is None:
            raise ValueError("the region is closed")
        return self._data

    @property
    def blocks(self) -> np.ndarray:
        """uint8 `[num_blocks, block_nbytes]` view of `data`."""
        return np.frombuffer(self.data, np.uint8).reshape(self.num_blocks, self.block_nbytes)

    @property
    def address(self) -> int:
        """Virtual address of block 0 in this process."""
        return self.blocks.ctypes.data

    def block(self, index: int) -> memoryview:
        """The `block_nbytes` bytes of one block."""
        if not 0 <= index < self.num_blocks:
            raise IndexError(f"block {index} of a pool of {self.num_blocks}")
        return self.data[index * self.block_nbytes : (index + 1) * self.block_nbytes]

    def keep(self) -> object:
        """Whoever holds this keeps the memory where it is, also past `close`."""
        return self.data

    @contextmanager
    def aside(self) -> Iterator[None]:
        """Copies from and to this memory made within are done on leaving, without waiting for a step."""
        yield

    def bind_thread(self) -> None:
        """Make this memory's device the calling thread's; before a transport works with it there."""

    def close(self) -> None:
        """Idempotent. The owner's descriptor is closed, so no new peer can attach."""
        mapping, self._mapping, self._data = self._mapping, None, None
        if mapping is None:
            return
        if self._owned:
            os.close(self.fd)
        try:
            mapping.close()
        except BufferError:
            pass  # a tensor or array still shows this memory; unmapped when the last one goes


def _pack(num_blocks: int, block_nbytes: int, incarnation: str) -> bytes:
    name = incarnation.encode()
    if len(name) > _INCARNATION_NBYTES or not name:
        raise ConfigError(f"incarnation {incarnation!r} must have 1 to {_INCARNATION_NBYTES} bytes")
    return _HEADER.pack(_MAGIC, _VERSION, num_blocks, block_nbytes, name)


def _verify(fd: int, pid: int, incarnation: str) -> tuple[int, int]:
    """Check header, seals and size; returns (num_blocks, block_nbytes)."""
    try:
        seals = fcntl.fcntl(fd, fcntl.F_GET_SEALS)
        header = os.pread(fd, _HEADER.size, 0)
        magic, version, num_blocks, block_nbytes, name = _HEADER.unpack(header)
    except (OSError, struct.error):
        seals, magic, version, num_blocks, block_nbytes, name = 0, b"", 0, 0, 0, b""
    if magic != _MAGIC or seals & _SEALS != _SEALS:
        raise PeerLost(f"process {pid} is not the KV pool's owner any more: the pid was reused")
    if version != _VERSION:
        raise PeerLost(f"process {pid} has a pool of version {version}, this one reads {_VERSION}")
    found = name.rstrip(b"\0").decode(errors="replace")
    if found != incarnation:
        raise PeerLost(f"process {pid} is incarnation {found!r}, not {incarnation!r}: it was restarted")
    if os.fstat(fd).st_size < PAGE_NBYTES + num_blocks * block_nbytes:
        raise PeerLost(f"the KV pool of process {pid} is shorter than its header says")
    return num_blocks, block_nbytes


def _no_memory(nbytes: int, why: str) -> ConfigError:
    return ConfigError(
        f"the KV pool needs {nbytes / 2**20:,.0f} MiB and {why}; "
        "set a smaller --kv-cache-memory-bytes or --num-blocks"
    )
