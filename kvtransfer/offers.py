"""The bytes of a transport's offer: JSON with a version and the geometry of the offered blocks.

An offer comes from another process, so nothing in it is trusted before it was looked at.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any, TypeVar

from core.errors import IncompatiblePeer, PeerLost
from kvtransfer.region import Region

OFFER_VERSION = 1

_BOUNDS = {
    "num_blocks": (1, 2**24),  # NIXL's table of them takes 24 bytes each
    "block_nbytes": (1, 2**40),
    "port": (1, 2**16 - 1),
    "pid": (1, 2**31 - 1),
    "fd": (0, 2**31 - 1),
    "device": (0, 2**16),
    "address": (1, 2**63),
}
"""Lowest and highest of each number."""

_MAX_CHARS = {"metadata": 2**20}
"""Of texts that may be longer than 256."""


@dataclass(frozen=True, slots=True)
class ShmOffer:
    """Where a peer on the same host finds the region: descriptor `fd` of process `pid`.

    `host` names the kernel and pid namespace in which `pid` means that process.
    """

    host: str
    pid: int
    fd: int
    incarnation: str
    num_blocks: int
    block_nbytes: int


@dataclass(frozen=True, slots=True)
class NixlOffer:
    """A NIXL agent's metadata (hex) and where its blocks lie in its own address space."""

    agent: str
    metadata: str
    address: int
    memory: str
    device: int
    incarnation: str
    num_blocks: int
    block_nbytes: int


@dataclass(frozen=True, slots=True)
class CollectiveOffer:
    """Where a peer accepts readers, with which it then builds a process group of two; they show `ticket`."""

    host: str
    port: int
    ticket: str
    incarnation: str
    num_blocks: int
    block_nbytes: int


Offer = ShmOffer | NixlOffer | CollectiveOffer
AnyOffer = TypeVar("AnyOffer", ShmOffer, NixlOffer, CollectiveOffer)


def encode(offer: Offer) -> bytes:
    return json.dumps({"version": OFFER_VERSION, **asdict(offer)}).encode()


def decode(body: bytes, kind: type[AnyOffer]) -> AnyOffer:
    """Raises IncompatiblePeer for another version, PeerLost for bytes that are no offer."""
    try:
        values: dict[str, Any] = json.loads(body)
        version = values.pop("version")
        if version != OFFER_VERSION:
            raise IncompatiblePeer("offer version", OFFER_VERSION, version)
        offer = kind(**values)
        wrong = [f.name for f in fields(offer) if type(getattr(offer, f.name)).__name__ != f.type]
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise PeerLost(f"the peer's {kind.__name__} cannot be read: {body[:80]!r}") from None
    wrong = wrong or [f.name for f in fields(offer) if not _sane(f.name, getattr(offer, f.name))]
    if wrong:
        raise PeerLost(f"the peer's {kind.__name__} is wrong in {', '.join(wrong)}")
    return offer


def _sane(name: str, value: str | int) -> bool:
    """Nothing here may cost memory, or lead to a place that an honest peer would not name."""
    if isinstance(value, int):
        lowest, highest = _BOUNDS[name]
        return lowest <= value <= highest
    if name == "memory":
        return value in ("DRAM", "VRAM")
    return 0 < len(value) <= _MAX_CHARS.get(name, 256) and value.isprintable()


def hosts_named(transport: str, bodies: Sequence[bytes]) -> set[str]:
    """Hosts that these offers name. NIXL's metadata hold addresses too, which UCX alone can read.

    Raises PeerLost or IncompatiblePeer.
    """
    return {decode(body, CollectiveOffer).host for body in bodies} if transport == "collective" else set()


def require_same_blocks(offer: Offer, region: Region) -> None:
    """Raises IncompatiblePeer unless a block of the peer has as many bytes as one of ours."""
    if offer.block_nbytes != region.block_nbytes:
        raise IncompatiblePeer("block_nbytes", region.block_nbytes, offer.block_nbytes)
