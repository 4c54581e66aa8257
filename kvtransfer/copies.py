"""Copying blocks beside the engine's thread."""

from __future__ import annotations

import numpy as np


def copy(target: memoryview, source: memoryview) -> None:
    """Copy bytes with the GIL released; a memoryview's slice assignment keeps it for the whole block.

    Raises ValueError unless both are equally long.
    """
    into, payload = np.frombuffer(target, np.uint8), np.frombuffer(source, np.uint8)
    if into.nbytes != payload.nbytes:  # a single byte would be broadcast
        raise ValueError(f"{payload.nbytes} bytes cannot fill a buffer of {into.nbytes}")
    np.copyto(into, payload)
