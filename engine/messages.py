"""What goes into an engine and what comes out: plain values, the only way to talk to its thread."""

from __future__ import annotations

from dataclasses import dataclass

from core.blocks import num_shareable_blocks
from core.errors import BatonError
from core.request import Request, TokenDelta
from core.step_model import GUESSED_DECODE, GUESSED_PREFILL, StepModel
from engine.matcher import Matcher
from engine.sequence import PrefillJob


@dataclass(frozen=True, slots=True)
class Add:
    """Queue a generation. Answered by TokenDeltas up to a finish reason, or by one Failed.

    `num_held`: how many leading blocks of the prompt a tier outside the pool holds. `matcher`: the
    beginning of the request's grammar, if it has one; the engine owns it from here on. `arrived_s`: when the
    worker got it, in this process's monotonic seconds; None = when the engine does.
    """

    request: Request
    num_held: int = 0
    matcher: Matcher | None = None
    arrived_s: float | None = None

    def num_tokens(self, block_size: int) -> int:
        """To compute here, before it is known what the pool holds."""
        tokens, held = len(self.request.common_tokens), self.num_held
        if self.request.prefill is not None:
            held = num_shareable_blocks(tokens, block_size)
        return tokens - held * block_size


@dataclass(frozen=True, slots=True)
class AddPrefill:
    """Queue a prefill job. Answered by BlocksBuilt, or by one Failed. `num_held`, `arrived_s`: see Add."""

    job: PrefillJob
    num_held: int = 0
    arrived_s: float | None = None

    def num_tokens(self, block_size: int) -> int:
        """To compute here, before it is known what the pool holds."""
        return len(self.job.token_ids) - self.num_held * block_size


@dataclass(frozen=True, slots=True)
class Abort:
    """End a request, one of its choices, or a prefill job. Unknown ids are fine: it may be over."""

    request_id: str
    index: int | None = None


@dataclass(frozen=True, slots=True)
class BlocksArrived:
    """The first `count` blocks of this load stand verified in the pool.

    `from_store`: the first so many came out of tiers, which hold them already.
    """

    load_id: str
    count: int
    from_store: int = 0


@dataclass(frozen=True, slots=True)
class LoadReport:
    """What a load brought and took. Instants are this process's monotonic seconds.

    `by_tier`: how many of the arrived blocks came from each tier; a prefill worker gave the others.
    `plan`: the sources that were chosen and why.
    `unquiet`: blocks a transfer may still write into; they stay quarantined until Quiet.
    """

    arrived: int
    by_tier: tuple[tuple[str, int], ...] = ()
    remote_cached_blocks: int = 0
    remote_queue_s: float = 0.0
    nbytes: int = 0
    transfer_s: float = 0.0
    exposed_s: float = 0.0
    last_block_at: float | None = None
    error: str = ""
    plan: str = ""
    unquiet: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class LoadFinished:
    """This load is over, well or badly; nothing but `report.unquiet` is in flight any more."""

    load_id: str
    report: LoadReport


@dataclass(frozen=True, slots=True)
class Quiet:
    block_ids: tuple[int, ...]


Command = Add | AddPrefill | Abort | BlocksArrived | LoadFinished | Quiet


@dataclass(frozen=True, slots=True)
class LoadOrdered:
    """Bring blocks `first_block ...` of a request or job, with these hashes, into `block_ids`.

    From where, and whether it pays at all, is for the taker of the order to decide. `load_id` is the
    sequence's, since each choice of a request may load for itself; `index` is the choice. `parked`: it was
    preempted since it came, and what it had computed was parked. `remote`: the
    prefill worker that the plan names may be asked. Answer with
    BlocksArrived and exactly one LoadFinished, also after LoadCancelled.
    """

    load_id: str
    request_id: str
    first_block: int
    block_ids: tuple[int, ...]
    hashes: tuple[bytes, ...]
    remote: bool = False
    parked: bool = False
    index: int = 0


@dataclass(frozen=True, slots=True)
class LoadCancelled:
    load_id: str


@dataclass(frozen=True, slots=True)
class BlocksBuilt:
    """Blocks `first ...` of the job are committed in the pool as `block_ids`, at monotonic `at_s`.

    `cached`: they were found in the pool or in a tier, not computed. `queue_s`: that the job waited.
    """

    job_id: str
    first: int
    block_ids: tuple[int, ...]
    at_s: float
    cached: bool
    queue_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Failed:
    """The request or job is over without (the rest of) an answer."""

    request_id: str
    error: BatonError


Event = TokenDelta | LoadOrdered | LoadCancelled | BlocksBuilt | Failed


@dataclass(frozen=True, slots=True)
class EngineStats:
    """A snapshot after a step. Counters only grow; the rest are gauges.

    `queued_tokens`: of prompts, still to compute; `context_tokens`: that running decodes attend to.
    """

    total_blocks: int = 0
    free_blocks: int = 0
    cached_blocks: int = 0
    quarantined_blocks: int = 0
    running: int = 0
    waiting: int = 0
    loading: int = 0
    held: int = 0
    steps: int = 0
    queued_tokens: int = 0
    context_tokens: int = 0
    prefill_model: StepModel = GUESSED_PREFILL
    decode_model: StepModel = GUESSED_DECODE
    preemptions: int = 0
    prefix_queries: int = 0
    prefix_hits: int = 0
    evicted_blocks: int = 0
    step_failures: int = 0
    hash_mismatches: int = 0
