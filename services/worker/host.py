"""What both roles' services share of the process they live in."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from enum import StrEnum

from core.errors import Unavailable
from core.settings import Settings
from engine.messages import Abort, Add, AddPrefill
from services.worker.build import Built
from services.worker.hub import Hub
from services.worker.kv_events import KVEventLog
from services.worker.links import Links
from services.worker.metrics import WorkerMetrics
from services.worker.taken import TakenLog
from services.worker.tiers import Lookups
from wire.channel import OPEN, Identity


class Phase(StrEnum):
    LOADING = "loading"
    READY = "ready"
    DRAINING = "draining"


@dataclass(slots=True)
class WorkerHost:
    """One life of one worker.

    `phase` is what routers are told; `takes_work` stays true for a moment longer, since a router may have
    sent a request before it heard. `listeners` are called when phase or role change.
    """

    settings: Settings
    role: str
    worker_id: str
    incarnation: str
    hub: Hub
    phase: Phase = Phase.LOADING
    takes_work: bool = False
    listeners: list[Callable[[], None]] = field(default_factory=list)
    progress: tuple[str, float] = ("starting", 0.0)
    address: str = ""
    probe_address: str = ""
    identity: Identity = OPEN
    cores: list[int] = field(default_factory=list)
    kv_events: KVEventLog = field(default_factory=KVEventLog)
    links: Links = field(default_factory=Links)
    taken: TakenLog = field(default_factory=TakenLog)
    _built: Built | None = None
    _metrics: WorkerMetrics | None = None
    lookups: Lookups | None = None
    """Set once the model is loaded, on a worker with tiers."""

    @property
    def built(self) -> Built:
        assert self._built is not None, "services start after the model is loaded"
        return self._built

    @property
    def metrics(self) -> WorkerMetrics:
        assert self._metrics is not None, "services start after the model is loaded"
        return self._metrics

    def loaded(self, built: Built, metrics: WorkerMetrics) -> None:
        self._built, self._metrics = built, metrics
        self.hub.abort = lambda request_id: built.loop.submit(Abort(request_id))
        if built.stack:
            self.lookups = Lookups(built.stack, built.fingerprint, built.prompt_token_s)

    def take_up(self, request_id: str, work: Add | AddPrefill) -> None:
        """Hand it to the engine. `request_id`: the router's; States count the work from now on."""
        self.built.loop.submit(work)
        self.taken.add(request_id)

    def ready(self, role: str) -> None:
        """Take work, advertised as `role`."""
        self.role, self.phase, self.takes_work = role, Phase.READY, True
        self.progress = ("ready", 1.0)
        self.metrics.advertised(role)
        self._tell()

    def draining(self, *, takes_work: bool) -> None:
        """Be ready no more; whether new work is taken all the same."""
        self.phase, self.takes_work = Phase.DRAINING, takes_work
        self._tell()

    def _tell(self) -> None:
        for listener in self.listeners:
            listener()

    def require_ready(self) -> None:
        """Raises Unavailable while new work is not taken."""
        if not self.takes_work:
            raise Unavailable(f"worker {self.worker_id} is {self.phase}; ask another one")

    def hung(self) -> bool:
        """The engine's loop has not turned for too long."""
        return self._built is not None and self._built.loop.idle_s > self.settings.step_timeout_s
