"""Discovery by asking again and again, one look at a time.

    an answer         is the set; what is no address in it is left out and counted
    an empty answer   is believed when there were only such for `grace_s`: names flap, and a Redis that was
                      started anew knows nobody until the workers have renewed
    no answer         is counted, logged the first time, and begins that time anew

Whatever goes wrong, the last set holds.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

from core import log
from core.clock import Clock, monotonic
from core.errors import ConfigError
from services import address
from services.discovery.source import CountFault, Source

PATIENCE_S = 5.0
"""How long a look may take until it counts as failed. The next one is begun when it is over."""

_log = log.get("discovery")


class Settled:
    """What a series of answers amounts to. Pure."""

    def __init__(self, grace_s: float) -> None:
        self.addresses: frozenset[str] = frozenset()
        self._grace_s, self._not_empty_at = grace_s, float("-inf")

    def answered(self, addresses: frozenset[str], now: float) -> bool:
        """Whether the set is another one now."""
        if addresses:
            self._not_empty_at = now
        elif now - self._not_empty_at < self._grace_s:
            return False
        before, self.addresses = self.addresses, addresses
        return before != addresses

    def failed(self, now: float) -> None:
        """There was no answer."""
        self._not_empty_at = now


class Polled:
    """Looks at `source` every `poll_s` seconds. One `watch` at a time."""

    def __init__(self, source: Source, poll_s: float, grace_s: float, clock: Clock = monotonic) -> None:
        self.source = source
        self._poll_s, self._grace_s, self._clock = poll_s, grace_s, clock

    async def watch(self, count_fault: CountFault) -> AsyncIterator[frozenset[str]]:
        settled, failing, first = Settled(self._grace_s), False, True
        look: asyncio.Task[frozenset[str]] | None = None
        try:
            while True:
                look = look or asyncio.create_task(self.source.addresses())
                answer, why = await _outcome(look)
                if why:
                    count_fault("discovery")
                    if not failing:
                        _log.warning("discovery.failed", source=self.source.name, reason=why)
                failing = bool(why)
                if answer is None:
                    settled.failed(self._clock())
                elif settled.answered(answer, self._clock()) or first:
                    first = False
                    line = _log.info if settled.addresses else _log.warning
                    line("discovery.found", source=self.source.name, workers=len(settled.addresses))
                    yield settled.addresses
                if look.done():
                    look = None
                await asyncio.sleep(self._poll_s)
        finally:
            if look is not None:
                look.cancel()
                await asyncio.gather(look, return_exceptions=True)
            await self.source.close()


async def _outcome(look: asyncio.Task[frozenset[str]]) -> tuple[frozenset[str] | None, str]:
    """The answer if there is one, and what is wrong if anything is. A look that takes longer is left to go
    on: a resolver's thread cannot be ended, only waited for."""
    done, _ = await asyncio.wait({look}, timeout=PATIENCE_S)
    if not done:
        return None, f"no answer within {PATIENCE_S:g} s"
    try:
        found = look.result()
    except Exception as error:  # also one that nobody foresaw
        return None, str(error) or type(error).__name__
    good = frozenset(filter(_is_address, found))
    return good, f"{len(found) - len(good)} entries are not host:port" if good != found else ""


def _is_address(text: str) -> bool:
    try:
        return address.split(text, "--discovery")[1] > 0
    except ConfigError:
        return False
