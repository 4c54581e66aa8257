"""Filling and reading a host tier's slots, as a pool does."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from kvtransfer.host_tier import HostTier


def put(host: HostTier, block_hash: bytes, payload: memoryview) -> bool:
    """Copy one block in, unless it is held; whether it is held now."""
    _, slots = host.reserve([block_hash])
    for slot in slots:
        host.slot(slot)[:] = payload
    host.stored(len(slots), 0.0)
    host.publish([block_hash][: len(slots)], slots)
    return host.holds(block_hash)


def fill(into: Sequence[memoryview]) -> Callable[[Sequence[memoryview]], None]:
    """What `HostTier.load` gives its blocks to: copies them to `into`."""

    def write(payloads: Sequence[memoryview]) -> None:
        for buffer, payload in zip(into, payloads, strict=False):
            buffer[:] = payload

    return write
