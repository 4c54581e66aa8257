"""Workers by name: the address records of a headless service with one port for all, or SRV records."""

from __future__ import annotations

import asyncio
import socket
from typing import TYPE_CHECKING

from core.errors import ConfigError, Unavailable
from services import address
from services.discovery.source import Source

if TYPE_CHECKING:
    from dns.asyncresolver import Resolver

SRV_TIMEOUT_S = 4.0

_NOBODY = (socket.EAI_NONAME, getattr(socket, "EAI_NODATA", socket.EAI_NONAME))
"""The name is not known or has no such record: what a service without a ready worker answers."""


def lookup(rest: str) -> Source:
    """The source that `name:port` or `_service._protocol.name` stands for. Raises ConfigError."""
    if rest.startswith("_") and ":" not in rest:
        return SrvLookup(rest)
    try:
        host, port = address.split(rest, "--discovery dns://")
    except ConfigError:
        host, port = "", 0
    if not host or port == 0:
        raise ConfigError(
            f"--discovery dns://{rest} should be dns://name:port, or dns://_service._tcp.name for SRV records"
        )
    return HostLookup(host, port)


class HostLookup:
    """All IPv4 and IPv6 addresses of `host`, by the system's resolver, hence with /etc/hosts and search
    domains. What has both is found twice; the router uses it once."""

    def __init__(self, host: str, port: int) -> None:
        self.name = f"dns://{address.join(host, port)}"
        self._host, self._port = host, port

    async def addresses(self) -> frozenset[str]:
        loop = asyncio.get_running_loop()
        try:
            found = await loop.getaddrinfo(self._host, self._port, type=socket.SOCK_STREAM)
        except (OSError, UnicodeError) as error:
            if isinstance(error, socket.gaierror) and error.errno in _NOBODY:
                return frozenset()
            raise Unavailable(f"looking up {self._host} failed: {error}") from None
        return frozenset(address.join(str(place[0]), self._port) for *_, place in found)

    async def close(self) -> None:
        pass


class SrvLookup:
    """The targets and ports of `service`'s SRV records; priorities and weights are not looked at, since the
    planner knows each worker's load. `resolver`: None = the system's configuration."""

    def __init__(self, service: str, resolver: Resolver | None = None) -> None:
        try:
            import dns.asyncresolver
            import dns.exception
        except ImportError:
            raise ConfigError(
                "--discovery with SRV records needs the package dnspython; "
                "pip install 'baton[dns]', or write dns://name:port"
            ) from None
        self.name = f"dns://{service}"
        self._service = service
        try:
            self._resolver = resolver or dns.asyncresolver.Resolver()
        except dns.exception.DNSException as error:
            raise ConfigError(f"--discovery dns://{service}: this host has no resolver: {error}") from None

    async def addresses(self) -> frozenset[str]:
        import dns.exception
        import dns.resolver

        try:
            found = await self._resolver.resolve(self._service, "SRV", lifetime=SRV_TIMEOUT_S, search=True)
        except (dns.resolver.NXDOMAIN, dns.resolver.NoAnswer):
            return frozenset()
        except (dns.exception.DNSException, OSError) as error:
            raise Unavailable(f"looking up {self._service} failed: {error}") from None
        return frozenset(address.join(str(each.target).rstrip("."), each.port) for each in found)

    async def close(self) -> None:
        pass
