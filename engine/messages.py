"""What goes into an engine and what comes out: plain values, the only way to talk to its thread."""

from __future__ import annotations

from dataclasses import dataclass

from core.errors import BatonError
from core.request import PrefillTarget, Request, TokenDelta
from engine.sequence import PrefillJob


@dataclass(frozen=True, slots=True)
class Add:
    """Queue a generation. Answered by TokenDeltas up to a finish reason, or by one Failed."""

    request: Request


@dataclass(frozen=True, slots=True)
class AddPrefill:
    """Queue a prefill job. Answered by JobStarted and BlocksBuilt, or by one Failed."""

    job: PrefillJob


@dataclass(frozen=True, slots=True)
class Abort:
    """End a request, one of its choices, or a prefill job. Unknown ids are fine: it may be over."""

    request_id: str
    index: int | None = None


@dataclass(frozen=True, slots=True)
class BlocksArrived:
    """The first `count` blocks of this load stand verified in the pool."""

    request_id: str
    count: int


@dataclass(frozen=True, slots=True)
class LoadReport:
    """What a load brought and took. Instants are this process's monotonic seconds.

    `unquiet`: blocks a transfer may still write into; they stay quarantined until Quiet.
    """

    arrived: int
    remote_cached_blocks: int = 0
    nbytes: int = 0
    transfer_s: float = 0.0
    exposed_s: float = 0.0
    last_block_at: float | None = None
    error: str = ""
    unquiet: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class LoadFinished:
    """This load is over, well or badly; nothing but `report.unquiet` is in flight any more."""

    request_id: str
    report: LoadReport


@dataclass(frozen=True, slots=True)
class Quiet:
    block_ids: tuple[int, ...]


Command = Add | AddPrefill | Abort | BlocksArrived | LoadFinished | Quiet


@dataclass(frozen=True, slots=True)
class LoadOrdered:
    """Fetch blocks `first_block ...` of the request from `target` into `block_ids`.

    `token_ids` are the tokens of all full blocks from 0. Answer with BlocksArrived and exactly one
    LoadFinished, also after LoadCancelled.
    """

    request_id: str
    target: PrefillTarget
    token_ids: tuple[int, ...]
    cache_salt: str
    epoch: int
    first_block: int
    block_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class LoadCancelled:
    request_id: str


@dataclass(frozen=True, slots=True)
class JobStarted:
    job_id: str
    cached_blocks: int


@dataclass(frozen=True, slots=True)
class BlocksBuilt:
    """Blocks `first ...` of the job are committed in the pool as `block_ids`, at monotonic `at_s`."""

    job_id: str
    first: int
    block_ids: tuple[int, ...]
    at_s: float


@dataclass(frozen=True, slots=True)
class Failed:
    """The request or job is over without (the rest of) an answer."""

    request_id: str
    error: BatonError


Event = TokenDelta | LoadOrdered | LoadCancelled | JobStarted | BlocksBuilt | Failed


@dataclass(frozen=True, slots=True)
class EngineStats:
    """A snapshot after a step. Counters only grow; the rest are gauges. Tokens where not said otherwise."""

    total_blocks: int = 0
    free_blocks: int = 0
    cached_blocks: int = 0
    quarantined_blocks: int = 0
    running: int = 0
    waiting: int = 0
    loading: int = 0
    held: int = 0
    steps: int = 0
    step_s: float = 0.0
    preemptions: int = 0
    prefix_queries: int = 0
    prefix_hits: int = 0
    evicted_blocks: int = 0
    step_failures: int = 0
    hash_mismatches: int = 0
