"""What both roles' services share of the process they live in."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

from core.errors import Unavailable
from core.settings import Settings
from engine.messages import Abort
from services.worker.build import Built
from services.worker.hub import Hub
from services.worker.kv_events import KVEventLog
from services.worker.metrics import WorkerMetrics
from services.worker.tiers import Lookups


class Phase(StrEnum):
    LOADING = "loading"
    READY = "ready"
    DRAINING = "draining"


@dataclass(slots=True)
class WorkerHost:
    """One life of one worker."""

    settings: Settings
    role: str
    worker_id: str
    incarnation: str
    hub: Hub
    phase: Phase = Phase.LOADING
    progress: tuple[str, float] = ("starting", 0.0)
    address: str = ""
    probe_address: str = ""
    cores: list[int] = field(default_factory=list)
    kv_events: KVEventLog = field(default_factory=KVEventLog)
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
            token_s = lambda: built.loop.stats.prefill_token_s  # noqa: E731
            self.lookups = Lookups(built.stack, built.fingerprint, token_s)

    def require_ready(self) -> None:
        """Raises Unavailable while new work is not taken."""
        if self.phase is not Phase.READY:
            raise Unavailable(f"worker {self.worker_id} is {self.phase}; ask another one")

    def hung(self) -> bool:
        """The engine's loop has not turned for too long."""
        return self._built is not None and self._built.loop.idle_s > self.settings.step_timeout_s
