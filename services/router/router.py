"""What the routes share: settings, the text side, the fleet, the bound on concurrent requests."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from contextlib import contextmanager

from core.errors import ModelNotFound, Overloaded, Unavailable
from core.settings import Settings
from services.router.fleet import Fleet
from services.router.metrics import RouterMetrics
from services.router.roster import WorkerState
from services.router.text import TextSide


class Router:
    """One router process. `text` and `fleet` are there once the model's files have been read."""

    def __init__(self, settings: Settings, rng: random.Random | None = None) -> None:
        self.settings = settings
        self.rng = rng or random.SystemRandom()
        self.text: TextSide | None = None
        self.fleet: Fleet | None = None
        self.draining = False
        self.metrics = RouterMetrics(lambda: self.fleet)
        self.created = int(time.time())
        self._in_flight = 0

    def serving(self) -> tuple[TextSide, Fleet]:
        """Raises Unavailable while the model's files are being read."""
        if self.text is None or self.fleet is None:
            raise Unavailable("the router is still loading the tokenizer; try again in a moment")
        return self.text, self.fleet

    def check_model(self, name: str | None) -> None:
        """Raises ModelNotFound unless `name` is the served model (or None)."""
        text, _ = self.serving()
        if name is not None and name != text.name:
            raise ModelNotFound(
                f"the model `{name[:100]}` is not served here; this server has `{text.name}`", param="model"
            )

    @contextmanager
    def admit(self) -> Iterator[None]:
        """Hold one of the places for requests. Raises Overloaded when all are taken."""
        limit = self.settings.max_concurrent_requests
        if self._in_flight >= limit:
            raise Overloaded(f"{limit} requests are being answered already; try again in a second")
        if self.draining:
            raise Unavailable("this router is shutting down; ask another one")
        self._in_flight += 1
        self.metrics.in_flight.set(self._in_flight)
        try:
            yield
        finally:
            self._in_flight -= 1
            self.metrics.in_flight.set(self._in_flight)

    def max_model_len(self) -> int:
        """The longest prompt + answer in tokens: the decode workers' limit, or the model's own."""
        text, fleet = self.serving()
        reference = fleet.roster.reference
        return reference.max_model_len if reference else text.max_position

    def readiness(self) -> tuple[bool, list[str]]:
        """Whether a request could be answered now, and what is wrong with anything."""
        if self.text is None or self.fleet is None:
            return False, ["the tokenizer is being loaded"]
        problems = [
            f"{member.role or 'worker'} {member.worker_id} is {state.value}"
            + (f": {reason}" if state is WorkerState.INCOMPATIBLE else "")  # others may name addresses
            for member, state, reason in self.fleet.workers()
            if state is not WorkerState.READY
        ]
        can_decode = bool(self.fleet.view().decode)
        if not can_decode:
            problems.insert(0, "no decode worker is ready")
        if self.draining:
            problems.insert(0, "the router is shutting down")
        return can_decode and not self.draining, problems
