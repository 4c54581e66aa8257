"""One sequence: its tokens, its blocks, and how far it has been computed.

    tokens        | prompt ............................ | output ... |
    num_computed  |=========================>
    block_table   | b0 | b1 | b2 | b3 | ...      covers at least num_computed tokens
    num_committed   full blocks whose hash stands in the pool's prefix cache

    num_dropped     leading blocks that fell out of the sliding window and were given back; their
                    entries stay, so that the others keep their places, and are never read

num_loaded counts prompt tokens whose KV a load brought; num_held the leading blocks that a tier is
known to hold; `parked` the hashes pinned there while the sequence is preempted; the load that runs
brings blocks load_first .. load_until - 1.

The KV of the last token is not computed before that token is fed in; `num_to_compute` of a decoding
sequence is therefore 1.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

from core.blocks import BlockHasher
from core.request import Request, SamplingParams
from engine.matcher import Matcher


class State(Enum):
    WAITING = "waiting"
    LOADING = "loading"  # blocks are arriving from a source
    RUNNING = "running"
    HELD = "held"  # built here, leased to a peer
    FINISHED = "finished"


@dataclass(frozen=True, slots=True)
class PrefillJob:
    """Blocks that a peer wants built: `token_ids` fill whole blocks; nothing is sampled."""

    job_id: str
    token_ids: tuple[int, ...]
    cache_salt: str = ""


@dataclass(eq=False, slots=True)
class Sequence:
    """One choice of a request, or a prefill job (`request` is None then)."""

    seq_id: str
    tokens: list[int]
    num_prompt: int
    hasher: BlockHasher
    order: int
    arrived_s: float
    request: Request | None = None
    index: int = 0
    state: State = State.WAITING
    block_table: list[int] = field(default_factory=list)
    num_computed: int = 0
    num_committed: int = 0
    num_dropped: int = 0
    num_passed_over: int = 0
    num_published: int = 0
    first_scheduled_s: float | None = None
    num_cached: int = 0
    num_loaded: int = 0
    num_held: int = 0
    parked: list[bytes] = field(default_factory=list)
    load_first: int = 0
    load_until: int = 0
    wants_remote: bool = False
    aborted: bool = False
    penalties: object | None = None
    matcher: Matcher | None = None

    @property
    def request_id(self) -> str:
        """What commands and events call it: the request's id, or the job's."""
        return self.request.request_id if self.request else self.seq_id

    @property
    def sampling(self) -> SamplingParams:
        assert self.request is not None
        return self.request.sampling

    @property
    def is_prefill_job(self) -> bool:
        return self.request is None

    @property
    def num_output(self) -> int:
        return len(self.tokens) - self.num_prompt

    @property
    def num_to_compute(self) -> int:
        return len(self.tokens) - self.num_computed

    @property
    def decoding(self) -> bool:
        return not self.is_prefill_job and self.num_output > 0 and self.num_to_compute == 1

    @property
    def wants_every_row(self) -> bool:
        """Whether the logits of all its tokens are wanted: for the log probabilities of its prompt."""
        return self.request is not None and self.request.sampling.prompt_logprobs and self.num_output == 0

    @property
    def live_blocks(self) -> list[int]:
        """The blocks that it holds a reference to."""
        return self.block_table[self.num_dropped :]

    @property
    def width(self) -> int:
        """How many sequences this one may become: n before the prompt's end, 1 afterwards, and where each
        choice goes on by itself."""
        if self.request is None or self.num_output > 0 or self.index > 0 or self.request.resumed:
            return 1
        return self.request.sampling.n

    def append(self, token_id: int) -> None:
        self.tokens.append(token_id)
        self.hasher.extend((token_id,))

    def caught_up_matcher(self) -> Matcher | None:
        """Where the output stands in its grammar; None without one."""
        if self.matcher is not None:
            self.matcher.advance(self.tokens[self.num_prompt + self.matcher.num_seen :])
        return self.matcher

    def fork(self, index: int, order: int) -> Sequence:
        """Another choice over the same prompt and the same blocks (the caller counts references)."""
        assert self.request is not None
        return Sequence(
            seq_id=f"{self.request.request_id}/{index}",
            tokens=list(self.tokens),
            num_prompt=self.num_prompt,
            hasher=self.hasher.copy(),
            order=order,
            arrived_s=self.arrived_s,
            request=self.request,
            index=index,
            state=self.state,
            block_table=list(self.block_table),
            num_computed=self.num_computed,
            num_committed=self.num_committed,
            num_dropped=self.num_dropped,
            first_scheduled_s=self.first_scheduled_s,
            matcher=self.matcher and self.matcher.fork(),
            num_cached=self.num_cached,
            num_loaded=self.num_loaded,
        )
