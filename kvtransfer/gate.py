"""Whose a buffer is while threads work for a caller who may leave."""

from __future__ import annotations

import threading

from kvtransfer.copies import copy


class Gate:
    """Lets threads use their caller's buffers only while the caller waits for them."""

    def __init__(self) -> None:
        self._quiet = threading.Condition()
        self._num_copying = 0
        self.is_open = True

    def copy(self, target: memoryview, source: memoryview) -> bool:
        """Copy unless the caller has left; returns whether it was done. Others may copy meanwhile."""
        with self._quiet:
            if not self.is_open:
                return False
            self._num_copying += 1
        try:
            copy(target, source)
        finally:
            with self._quiet:
                self._num_copying -= 1
                self._quiet.notify_all()
        return True

    def close(self) -> None:
        """Returns once no copy runs, which takes one memcpy at most; none begins afterwards."""
        with self._quiet:
            self.is_open = False
            self._quiet.wait_for(lambda: not self._num_copying)
