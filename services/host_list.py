"""Hosts and networks that a process may connect to, as a setting lists them."""

from __future__ import annotations

import ipaddress
import socket
from dataclasses import dataclass

from core.errors import ConfigError, PeerLost

Address = ipaddress.IPv4Address | ipaddress.IPv6Address
Network = ipaddress.IPv4Network | ipaddress.IPv6Network


@dataclass(frozen=True, slots=True)
class HostList:
    """`names` as written, and networks; empty = all hosts."""

    names: frozenset[str] = frozenset()
    networks: tuple[Network, ...] = ()

    @classmethod
    def parse(cls, text: str, flag: str = "--transfer-hosts") -> HostList:
        """`10.0.0.0/8, 192.168.1.7, prefill.local`. Raises ConfigError."""
        names, networks = set(), []
        for part in (part.strip("[] ") for part in text.replace("]/", "/").split(",")):
            try:
                networks.append(ipaddress.ip_network(part, strict=False))
            except ValueError:
                if "/" in part or ":" in part or " " in part:
                    raise ConfigError(
                        f"{flag}: {part!r} is neither a host nor a network such as 10.0.0.0/8"
                    ) from None
                names |= {part.lower()} if part else set()
        if text and not (names or networks):
            raise ConfigError(f"{flag} has no host in it; leave it out to allow all")
        return cls(frozenset(names), tuple(networks))

    @property
    def lists_all(self) -> bool:
        return not (self.names or self.networks)

    def check(self, host: str) -> None:
        """Raises PeerLost for a host that is not listed; a name that is not has to resolve to listed ones
        alone. Resolving may block."""
        if self.lists_all or host.lower() in self.names:
            return
        foreign = [str(each) for each in addresses(host) if not self._lists(each)]
        if foreign:
            where = host if foreign == [host] else f"{host} ({', '.join(foreign)})"
            raise PeerLost(f"{where} is not among --transfer-hosts; add it there if it is one of ours")

    def _lists(self, address: Address) -> bool:
        return any(address in network for network in self.networks)


def require_same_host(named: str, host: str) -> None:
    """Raises PeerLost unless `named`, which a peer at `host` says it is reached at, is that same host."""
    if not addresses(named) <= addresses(host):
        raise PeerLost(
            f"the peer at {host} offers its blocks at {named[:100]!r}, another host; if that is right, list "
            "both in --transfer-hosts"
        )


def addresses(host: str) -> set[Address]:
    """What a host resolves to. Raises PeerLost when it does not."""
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        raise PeerLost(f"the host {host[:100]!r} cannot be found: {error}") from None
    return {_plain(ipaddress.ip_address(str(each[4][0]).partition("%")[0])) for each in found}


def _plain(address: Address) -> Address:
    """An IPv4 address that is written as IPv6 is still that address."""
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return mapped or address
