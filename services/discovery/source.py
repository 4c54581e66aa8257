"""What discovery is made of: somebody who knows addresses, and how a router hears of them."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from typing import Protocol

CountFault = Callable[[str], None]
"""Told the place of a fault, for `baton_faults_total{where}`."""


class Discovery(Protocol):
    """A source of worker addresses, as a router follows it."""

    def watch(self, count_fault: CountFault) -> AsyncIterator[frozenset[str]]:
        """The whole set of `host:port` addresses, at once and again whenever it changes.

        It may end (the last set then holds for good) and is safe to close at any time.
        """
        ...


class Source(Protocol):
    """Somebody who can be asked, now and then."""

    name: str
    """For logs; without passwords."""

    async def addresses(self) -> frozenset[str]:
        """Those known now. Raises Unavailable when nobody answers."""
        ...

    async def close(self) -> None:
        """Idempotent, and bounded."""
        ...
