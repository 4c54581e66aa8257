"""How often a stream is written to, when the router cannot keep up.

What a written event costs hardly depends on how many tokens are in it. So when the event loop runs late,
every stream rests a little after each event: what comes meanwhile goes out as one event. A loop that keeps up
sends each token at once.
"""

from __future__ import annotations

import asyncio

LOOK_EVERY_S = 0.02
LATE_S = 0.005
"""Later than this, the loop is behind and not only busy with one message."""

MAX_REST_S = 0.05
FADE = 0.8
"""Share of the longest delay that still counts at the next look."""


class Pace:
    """`rest_s`: how long each stream rests now, 0 as a rule. `follow` keeps it up to date until cancelled."""

    def __init__(self) -> None:
        self.rest_s = 0.0
        self._late_s = 0.0

    async def follow(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            due = loop.time() + LOOK_EVERY_S
            await asyncio.sleep(LOOK_EVERY_S)
            self.looked(loop.time() - due)

    def looked(self, late_s: float) -> None:
        """A timer was so late."""
        self._late_s = max(late_s, FADE * self._late_s)
        self.rest_s = min(self._late_s, MAX_REST_S) if self._late_s > LATE_S else 0.0
