"""Which addresses have workers. Nothing more: what is behind an address, its `Watch` stream tells.

A source is named by a URL; `from_url` looks its scheme up in `SCHEMES`. Another source (DNS of a
headless service, Redis leases, Ray) is one more class with `watch` and one more line there.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import Protocol

from core.errors import ConfigError


class Discovery(Protocol):
    """A source of worker addresses."""

    def watch(self) -> AsyncIterator[frozenset[str]]:
        """The whole set of `host:port` addresses, at once and again whenever it changes.

        It may end (the last set then holds for good) and is safe to close at any time.
        """
        ...


@dataclass(frozen=True, slots=True)
class StaticDiscovery:
    """A list that never changes: `static://host:port,host:port`."""

    addresses: tuple[str, ...]

    async def watch(self) -> AsyncIterator[frozenset[str]]:
        yield frozenset(self.addresses)


def _static(rest: str) -> StaticDiscovery:
    addresses = tuple(dict.fromkeys(part.strip() for part in rest.split(",") if part.strip()))
    if not addresses:
        raise ConfigError("discovery static:// names no worker; write static://host:port,host:port")
    for address in addresses:
        host, _, port = address.rpartition(":")
        if not host or not port.isdigit() or not 0 < int(port) < 65536:
            raise ConfigError(f"discovery: {address!r} is not host:port")
    return StaticDiscovery(addresses)


SCHEMES: dict[str, Callable[[str], Discovery]] = {"static": _static}


def from_url(url: str) -> Discovery:
    """The source that `url` (`scheme://rest`) names. Raises ConfigError, listing the known schemes."""
    if not url:
        raise ConfigError("the router needs to know its workers: --discovery static://host:port,host:port")
    scheme, separator, rest = url.partition("://")
    if not separator or scheme not in SCHEMES:
        known = ", ".join(f"{name}://" for name in SCHEMES)
        raise ConfigError(f"discovery {url!r} is not known; known: {known}")
    return SCHEMES[scheme](rest)
