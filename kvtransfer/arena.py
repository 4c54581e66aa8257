"""The host tier's memory: one anonymous mapping, taken from the system once and at start."""

from __future__ import annotations

import contextlib
import mmap

import numpy as np

from core.errors import ConfigError
from kvtransfer.memory import available_nbytes


class Arena:
    """`num_slots` slots of `slot_nbytes` bytes; unmapped when it and the last view of a slot are gone.

    Every page is touched here: page faults made the first copy into fresh memory 0.3 GB/s where later ones
    reach 11, and a machine that lacks the memory should say so now. Huge pages are asked for, not required.
    Raises ConfigError.
    """

    def __init__(self, num_slots: int, slot_nbytes: int) -> None:
        if num_slots < 1:
            raise ConfigError(
                f"the host tier holds not even one block of {slot_nbytes} bytes; "
                "set a larger --host-cache-bytes, or 0 for none"
            )
        nbytes = num_slots * slot_nbytes
        available = available_nbytes()
        if nbytes > available:
            raise ConfigError(
                f"the host tier needs {nbytes / 2**20:,.0f} MiB and only {available / 2**20:,.0f} MiB are "
                "free; set a smaller --host-cache-bytes"
            )
        self.num_slots, self.slot_nbytes = num_slots, slot_nbytes
        mapping = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        with contextlib.suppress(OSError):  # a kernel built without them
            mapping.madvise(mmap.MADV_HUGEPAGE)
        self._slots = np.frombuffer(mapping, np.uint8).reshape(num_slots, -1)
        self._slots.reshape(-1)[:: mmap.PAGESIZE] = 0

    @property
    def memory(self) -> memoryview:
        """All slots, one after the other."""
        return self._slots.reshape(-1).data

    def slot(self, index: int) -> memoryview:
        """The writable bytes of one slot."""
        return memoryview(self._slots[index])
