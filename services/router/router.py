"""What the routes share: settings, keys, the text side, the fleet, admission."""

from __future__ import annotations

import random
import time
from contextlib import AbstractContextManager

from core import log
from core.errors import SOON_S, ConfigError, ModelNotFound, Unavailable
from core.settings import Settings
from planning.fair_queue import Share
from planning.retry_budget import RetryBudget
from services.router.admission import Admission, Visit
from services.router.fleet import Fleet
from services.router.keys import load_keys
from services.router.metrics import RouterMetrics
from services.router.pace import Pace
from services.router.records import Records
from services.router.standing import WorkerState
from services.router.text import TextSide

MAX_SHOWN = 100
"""Workers that `/ready` tells of, to whoever asks."""

logger = log.get("router")


class Router:
    """One router process. `text` and `fleet` are there once the model's files have been read."""

    def __init__(self, settings: Settings, rng: random.Random | None = None) -> None:
        """Raises ConfigError for keys that cannot be read."""
        self.settings = settings
        self.rng = rng or random.Random()
        self.text: TextSide | None = None
        self.fleet: Fleet | None = None
        self.leaving = False  # not ready any more
        self.draining = False  # takes no requests any more
        self.metrics = RouterMetrics(lambda: self.fleet)
        self.records = Records(settings.request_record_bytes)
        self.retries = RetryBudget()
        self.pace = Pace()
        self.created = int(time.time())
        self.keys = load_keys(settings)
        self.admission = Admission(settings, self.metrics, lambda: self.fleet)

    def reload_keys(self) -> None:
        """Read the keys again; they stay as they are where that fails."""
        try:
            self.keys = load_keys(self.settings)
            logger.info("router.keys_read")
        except ConfigError as error:
            logger.error("router.keys_unchanged", reason=error.message)

    def serving(self) -> tuple[TextSide, Fleet]:
        """Raises Unavailable while the model's files are being read."""
        if self.text is None or self.fleet is None:
            raise Unavailable("the router is still loading the tokenizer; try again", retry_after_s=SOON_S)
        return self.text, self.fleet

    def check_model(self, name: str | None) -> None:
        """Raises ModelNotFound unless `name` is the served model (or None)."""
        text, _ = self.serving()
        if name is not None and name != text.name:
            raise ModelNotFound(
                f"the model `{name[:100]}` is not served here; this server has `{text.name}`", param="model"
            )

    def admit(self, share: Share) -> AbstractContextManager[Visit]:
        """One request of an API key. Raises Unavailable at the end of the router, Overloaded on entering."""
        if self.draining:
            raise Unavailable("this router is shutting down; ask another one", retry_after_s=SOON_S)
        return self.admission.visit(share)

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
            for member, state, reason in self.fleet.some(MAX_SHOWN)
            if state not in (WorkerState.READY, WorkerState.DUPLICATE)
        ]
        if more := self.fleet.num_amiss() - len(problems):
            problems.append(f"{more} more workers are not ready; /v1/cluster has all of them")
        can_decode = bool(self.fleet.view().decode)
        if not can_decode:
            problems.insert(0, "no decode worker is ready")
        if self.leaving:
            problems.insert(0, "the router is shutting down")
        return can_decode and not self.leaving, problems
