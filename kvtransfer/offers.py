"""The bytes of a transport's offer: JSON with a version and the geometry of the offered blocks.

An offer comes from another process, so nothing in it is trusted before it was looked at.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, fields
from typing import Any, TypeVar

from core.errors import IncompatiblePeer, PeerLost
from kvtransfer.region import Region

OFFER_VERSION = 1


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
    """Where a peer accepts readers with which it then builds a process group of two."""

    host: str
    port: int
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
    except (ValueError, KeyError, TypeError, AttributeError):
        raise PeerLost(f"the peer's {kind.__name__} cannot be read: {body[:80]!r}") from None
    if wrong or offer.num_blocks < 1:
        raise PeerLost(f"the peer's {kind.__name__} is wrong in {', '.join(wrong) or 'num_blocks'}")
    return offer


def require_same_blocks(offer: Offer, region: Region) -> None:
    """Raises IncompatiblePeer unless a block of the peer has as many bytes as one of ours."""
    if offer.block_nbytes != region.block_nbytes:
        raise IncompatiblePeer("block_nbytes", region.block_nbytes, offer.block_nbytes)
