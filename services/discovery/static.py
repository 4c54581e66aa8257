"""A list that never changes."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass

from core.errors import ConfigError
from services import address
from services.discovery.source import CountFault


@dataclass(frozen=True, slots=True)
class StaticDiscovery:
    addresses: tuple[str, ...]

    @classmethod
    def read(cls, rest: str) -> StaticDiscovery:
        """From `host:port,host:port`. Raises ConfigError for an entry that is no address."""
        addresses = tuple(dict.fromkeys(part.strip() for part in rest.split(",") if part.strip()))
        if not addresses:
            raise ConfigError("--discovery static:// names no worker; write static://host:port,host:port")
        for each in addresses:
            if address.split(each, "--discovery")[1] == 0:
                raise ConfigError(
                    f"--discovery {each!r} names no port; give the one that the worker listens on"
                )
        return cls(addresses)

    async def watch(self, count_fault: CountFault) -> AsyncIterator[frozenset[str]]:
        yield frozenset(self.addresses)
