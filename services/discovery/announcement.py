"""How a worker stays known: it renews its lease, and gives it up when it drains."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Protocol

from core import log
from services import address as addresses
from services.discovery.source import Source

RENEWALS_PER_LEASE = 3
"""Two may be lost."""

RETRY_S = 1.0

_log = log.get("discovery")


class Register(Source, Protocol):
    """Leases on addresses, counted by one clock: the register's own. Each call is bounded and raises
    Unavailable when nobody answers."""

    async def renew(self, address: str, lease_s: float) -> None:
        """`address` is one of `addresses()` for `lease_s` from when this arrives."""
        ...

    async def withdraw(self, address: str) -> None:
        """It is not any more. Idempotent."""
        ...


class Announcement:
    """Keeps `address` in `register`. A register that does not answer disturbs nothing but itself."""

    def __init__(self, register: Register, address: str, lease_s: float) -> None:
        self._register, self._address, self._lease_s = register, address, lease_s
        self._renewing: asyncio.Task[None] | None = None

    def start(self, failed: Callable[[], None]) -> None:
        """Announce from now on; `failed` is told of each time that nobody took it."""
        if addresses.is_loopback(addresses.split(self._address, "--advertise")[0]):
            hint = "only routers of this host reach it; name another with --advertise"
            _log.info("discovery.announces_loopback", address=self._address, hint=hint)
        self._renewing = asyncio.create_task(self._renew(failed))

    async def withdraw(self) -> None:
        """Routers that look now do not find this worker; those that know it follow it to its end.
        Idempotent."""
        if self._renewing is None:
            return
        self._renewing.cancel()
        await asyncio.gather(self._renewing, return_exceptions=True)
        self._renewing = None
        try:
            await self._register.withdraw(self._address)
        except Exception as error:
            _log.warning("discovery.not_withdrawn", source=self._register.name, reason=str(error))
        await self._register.close()

    async def _renew(self, failed: Callable[[], None]) -> None:
        failing = False
        while True:
            pause_s = self._lease_s / RENEWALS_PER_LEASE
            try:
                await self._register.renew(self._address, self._lease_s)
                if failing:
                    _log.info("discovery.announced_again", source=self._register.name)
                failing = False
            except Exception as error:  # also one that nobody foresaw: a worker must not fall out of sight
                failed()
                if not failing:
                    _log.warning("discovery.not_announced", source=self._register.name, reason=str(error))
                failing, pause_s = True, min(RETRY_S, pause_s)
            await asyncio.sleep(pause_s)
