"""Decides what each step computes. Pure bookkeeping: no model, no network, no waiting.

Each step takes every decoding sequence first, then prompts up to the token budget. A prompt's
blocks are reserved as a whole when it is admitted; output blocks are taken one at a time, and when
none is left the youngest running sequence is preempted: its blocks go back (still in the prefix
cache), it waits at the head of the queue and later continues as if it had never stopped.

    Add -> WAITING --admit--> RUNNING ------------------> FINISHED
              ^   \\--admit--> LOADING --LoadFinished--^      ^
              '--- preempt ---- RUNNING                      |
    AddPrefill -> WAITING --admit--> RUNNING --> HELD -- Abort/release
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from core.blocks import BlockHasher, num_blocks_for, num_shareable_blocks
from core.clock import Clock, monotonic
from core.errors import ContextLengthExceeded, Overloaded
from core.request import Request
from engine.block_pool import BlockPool, NoFreeBlocks
from engine.budget import share_budget
from engine.messages import (
    BlocksBuilt,
    Event,
    Failed,
    JobStarted,
    LoadCancelled,
    LoadOrdered,
    LoadReport,
)
from engine.sequence import PrefillJob, Sequence, State

MAX_PASSED_OVER = 32
"""How often later arrivals may be admitted before a request that does not fit yet."""


@dataclass(frozen=True, slots=True)
class Chunk:
    """`count` tokens of one sequence from position `start`; `sample`: its last token's logits are wanted."""

    seq: Sequence
    start: int
    count: int
    sample: bool


@dataclass(slots=True)
class StepPlan:
    """What to do now: first the copies, then one forward pass over the chunks."""

    chunks: list[Chunk] = field(default_factory=list)
    copies: list[tuple[int, int]] = field(default_factory=list)
    events: list[Event] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Limits:
    """What one worker may take on."""

    block_size: int
    max_num_seqs: int
    max_num_batched_tokens: int
    max_waiting: int
    min_remote_tokens: int


class Scheduler:
    """All sequences of one worker and their place in its pool."""

    def __init__(
        self, pool: BlockPool, limits: Limits, namespace: bytes, clock: Clock = monotonic
    ) -> None:
        self.pool, self.limits, self.namespace, self._clock = pool, limits, namespace, clock
        self.waiting: list[Sequence] = []
        self.loading: dict[str, Sequence] = {}
        self.running: list[Sequence] = []
        self.held: dict[str, Sequence] = {}
        self.reports: dict[str, LoadReport] = {}
        self.num_preempted = self.num_queried = self.num_hit = self.num_hash_mismatches = 0
        self._order = 0
        self._pending: list[Event] = []

    # ---- what comes in

    def add(self, request: Request) -> Failed | None:
        """Queue a request, or say why not: it can never fit, or the queue is full."""
        size, prompt = self.limits.block_size, len(request.prompt_token_ids)
        capacity = self.pool.num_blocks * size
        if prompt + max(1, request.sampling.max_tokens) > capacity:
            return Failed(
                request.request_id,
                ContextLengthExceeded(
                    f"prompt ({prompt} tokens) and max_tokens ({request.sampling.max_tokens}) exceed the "
                    f"KV pool of {capacity} tokens; shorten the prompt or lower max_tokens"
                ),
            )
        if failed := self._busy(request.request_id):
            return failed
        seq = self._new(f"{request.request_id}/0", request.prompt_token_ids, request.cache_salt)
        seq.request = request
        seq.wants_remote = request.prefill is not None and not request.sampling.prompt_logprobs
        if request.block_hashes and list(request.block_hashes) != seq.hasher.hashes:
            self.num_hash_mismatches += 1
        self.waiting.append(seq)
        return None

    def add_prefill(self, job: PrefillJob) -> Failed | None:
        """Queue a prefill job, or say why not."""
        num_blocks = num_blocks_for(len(job.token_ids), self.limits.block_size)
        if num_blocks > self.pool.num_blocks:
            return Failed(
                job.job_id,
                ContextLengthExceeded(
                    f"the prompt needs {num_blocks} blocks, this prefill worker has {self.pool.num_blocks}"
                ),
            )
        if failed := self._busy(job.job_id):
            return failed
        self.waiting.append(self._new(job.job_id, job.token_ids, job.cache_salt))
        return None

    def abort(self, request_id: str, index: int | None = None) -> None:
        """End what belongs to this id; idempotent. Blocks in flight stay until the load is finished."""
        if held := self.held.pop(request_id, None):
            self._finish(held)
        for seq in self._of(request_id, index):
            if seq.state is State.LOADING:
                if not seq.aborted:
                    seq.aborted = True
                    self._pending.append(LoadCancelled(request_id))
                continue
            (self.waiting if seq.state is State.WAITING else self.running).remove(seq)
            self._finish(seq)

    def blocks_arrived(self, request_id: str, count: int) -> None:
        """The first `count` blocks of a running load are verified and may be shared."""
        seq = self.loading.get(request_id)
        if seq is not None and not seq.aborted:
            self._mark_arrived(seq, count)

    def load_finished(self, request_id: str, report: LoadReport) -> None:
        """A load is over: the sequence computes whatever did not arrive."""
        seq = self.loading.pop(request_id, None)
        if seq is None:
            return
        if not seq.aborted:
            self._mark_arrived(seq, report.arrived)
        if report.unquiet:
            self._swap_out_unquiet(seq, frozenset(report.unquiet))
        if seq.aborted:
            self._finish(seq)
            return
        self.reports[request_id] = report
        if seq.state is not State.WAITING:  # its unquiet blocks may have cost it its place
            seq.state = State.RUNNING
            self._insert(self.running, seq)

    # ---- one step

    def schedule(self) -> StepPlan:
        """Choose the next step's work and reserve its blocks."""
        plan = StepPlan(events=self._pending)
        self._pending = []
        now = self._clock()
        for seq in [s for s in self.running if s.decoding]:
            if seq.state is State.RUNNING and self._make_room(seq, plan):
                plan.chunks.append(Chunk(seq, seq.num_computed, 1, sample=True))
        plan.chunks = [c for c in plan.chunks if c.seq.state is State.RUNNING]
        self._admit(plan, now)
        prompts = [s for s in self.running if not s.decoding and s.num_to_compute > 0]
        budget = max(self.limits.max_num_batched_tokens - len(plan.chunks), self.limits.block_size)
        shares = share_budget([s.num_to_compute for s in prompts], budget)
        for seq, count in zip(prompts, shares, strict=True):
            if count:
                last = count == seq.num_to_compute and not seq.is_prefill_job
                plan.chunks.append(Chunk(seq, seq.num_computed, count, sample=last))
        return plan

    def computed(self, chunk: Chunk, now: float) -> list[Event]:
        """The chunk's KV stands in the pool: commit its full blocks, publish those of a prefill job."""
        seq = chunk.seq
        seq.num_computed += chunk.count
        self._commit(seq)
        if not seq.is_prefill_job:
            return []
        events = self._publish(seq, now)
        if seq.num_to_compute == 0:
            self.running.remove(seq)
            seq.state = State.HELD
            self.held[seq.seq_id] = seq
        return events

    def fork(self, seq: Sequence) -> list[Sequence]:
        """All n choices of a sequence whose prompt is complete, itself first; blocks become shared."""
        forks = []
        for index in range(1, seq.width):
            child = seq.fork(index, self._next_order())
            self.pool.acquire(child.block_table)
            self.running.append(child)
            forks.append(child)
        return [seq, *forks]

    def finish(self, seq: Sequence) -> None:
        """A running sequence is done; its blocks go back (the full ones stay in the prefix cache)."""
        if seq in self.running:
            self.running.remove(seq)
        self._finish(seq)

    def is_live(self, request_id: str) -> bool:
        return bool(self._of(request_id, None)) or request_id in self.held

    # ---- admission

    def _admit(self, plan: StepPlan, now: float) -> None:
        """Take up waiting sequences in order; one that does not fit yet may be passed over, not for ever."""
        blocked: list[Sequence] = []
        for seq in list(self.waiting):
            active = len(self.running) + len(self.loading)
            if active and active + seq.width > self.limits.max_num_seqs:
                break
            if self._admit_one(seq, plan, now):
                for other in blocked:
                    other.num_passed_over += 1
            else:
                blocked.append(seq)
            if any(other.num_passed_over >= MAX_PASSED_OVER for other in blocked):
                break

    def _admit_one(self, seq: Sequence, plan: StepPlan, now: float) -> bool:
        size = self.limits.block_size
        cached = self._lookup(seq)
        need = num_blocks_for(len(seq.tokens), size) - len(cached)
        # One token beyond, so that a sequence is not admitted only to be preempted at once.
        room = num_blocks_for(len(seq.tokens) + (not seq.is_prefill_job), size) - len(cached)
        # Cached blocks that nobody holds stop being free when they are acquired.
        idle = sum(self.pool.refs(block_id) == 0 for block_id in cached)
        growth = sum(not other.is_prefill_job for other in self.running)
        if self.pool.num_free - idle - room < growth:
            return False
        self.pool.acquire(cached)
        seq.block_table = cached + self.pool.allocate(need)
        seq.num_computed = len(cached) * size
        seq.num_committed = len(cached)
        self._count_lookup(seq, len(cached))
        self.waiting.remove(seq)
        if seq.first_scheduled_s is None:
            seq.first_scheduled_s, seq.num_cached = now, seq.num_computed
        if seq.is_prefill_job:
            self._start_job(seq, plan, now)
        elif self._order_load(seq, plan, len(cached)):
            return True
        if seq.state is not State.HELD:
            seq.state = State.RUNNING
            self._insert(self.running, seq)
        return True

    def _start_job(self, seq: Sequence, plan: StepPlan, now: float) -> None:
        cached_blocks = seq.num_computed // self.limits.block_size
        plan.events.append(JobStarted(seq.seq_id, cached_blocks, now - seq.arrived_s))
        plan.events += self._publish(seq, now)
        if seq.num_to_compute == 0:
            seq.state = State.HELD
            self.held[seq.seq_id] = seq

    def _order_load(self, seq: Sequence, plan: StepPlan, num_cached: int) -> bool:
        size, request = self.limits.block_size, seq.request
        if request is None or request.prefill is None or not seq.wants_remote:
            return False
        seq.wants_remote = False  # asked once; after a preemption the rest is computed here
        num_full = num_shareable_blocks(seq.num_prompt, size)
        missing = num_full - num_cached
        if missing <= 0 or missing * size < self.limits.min_remote_tokens:
            return False
        seq.state = State.LOADING
        self.loading[request.request_id] = seq
        plan.events.append(
            LoadOrdered(
                request.request_id,
                request.prefill,
                request.prompt_token_ids[: num_full * size],
                request.cache_salt,
                request.epoch,
                num_cached,
                tuple(seq.block_table[num_cached:num_full]),
            )
        )
        return True

    def _lookup(self, seq: Sequence) -> list[int]:
        if not self.pool.caching or (seq.request and seq.sampling.prompt_logprobs):
            return []
        size = self.limits.block_size
        usable = (
            len(seq.tokens) // size
            if seq.is_prefill_job
            else num_shareable_blocks(len(seq.tokens), size)
        )
        return self.pool.match(seq.hasher.hashes[:usable], seq.tokens, size)

    def _count_lookup(self, seq: Sequence, num_hit_blocks: int) -> None:
        if self.pool.caching:
            self.num_queried += len(seq.tokens)
            self.num_hit += num_hit_blocks * self.limits.block_size

    # ---- blocks

    def _make_room(self, seq: Sequence, plan: StepPlan) -> bool:
        """A private slot for the next token, by preempting the youngest if need be."""
        size = self.limits.block_size
        at = seq.num_computed // size
        fresh = at == len(seq.block_table)
        if not fresh and self.pool.refs(seq.block_table[at]) == 1:
            return True
        while True:
            try:
                (block_id,) = self.pool.allocate(1)
                break
            except NoFreeBlocks:
                victim = max(self._preemptible(), key=lambda s: s.order)
                self._preempt(victim)
                if victim is seq:
                    return False
                if not fresh and self.pool.refs(seq.block_table[at]) == 1:
                    return True  # the victim shared the block, now it is private
        if fresh:
            seq.block_table.append(block_id)
        else:
            shared = seq.block_table[at]
            plan.copies.append((shared, block_id))
            seq.block_table[at] = block_id
            self.pool.release([shared])
        return True

    def _preemptible(self) -> Iterable[Sequence]:
        return (s for s in self.running if not s.is_prefill_job)

    def _preempt(self, seq: Sequence) -> None:
        self.running.remove(seq)
        self._give_back(seq)
        seq.state = State.WAITING
        self.num_preempted += 1
        self._insert(self.waiting, seq)

    def _mark_arrived(self, seq: Sequence, count: int) -> None:
        size = self.limits.block_size
        computed = seq.num_cached + count * size
        if computed > seq.num_computed:
            seq.num_computed = computed
            seq.num_remote = count * size
            self._commit(seq)

    def _swap_out_unquiet(self, seq: Sequence, unquiet: frozenset[int]) -> None:
        """Replace blocks that may still be written into; without replacements, start over later."""
        self.pool.quarantine(unquiet)
        try:
            fresh = iter(self.pool.allocate(len(unquiet)))
        except NoFreeBlocks:
            seq.block_table = [b for b in seq.block_table if b not in unquiet]
            if not seq.aborted:
                self._give_back(seq)
                seq.state = State.WAITING
                self._insert(self.waiting, seq)
            return
        seq.block_table = [next(fresh) if b in unquiet else b for b in seq.block_table]

    def _commit(self, seq: Sequence) -> None:
        size = self.limits.block_size
        for i in range(seq.num_committed, seq.num_computed // size):
            tokens = tuple(seq.tokens[i * size : (i + 1) * size])
            self.pool.commit(seq.block_table[i], seq.hasher.hashes[i], i, tokens)
            seq.num_committed = i + 1

    def _publish(self, seq: Sequence, now: float) -> list[Event]:
        first, until = seq.num_published, seq.num_computed // self.limits.block_size
        if until == first:
            return []
        seq.num_published = until
        return [BlocksBuilt(seq.seq_id, first, tuple(seq.block_table[first:until]), now)]

    def _give_back(self, seq: Sequence) -> None:
        self.pool.release(seq.block_table)
        seq.block_table = []
        seq.num_computed = seq.num_committed = 0

    def _finish(self, seq: Sequence) -> None:
        if seq.state is not State.FINISHED:
            seq.state = State.FINISHED
            self._give_back(seq)
            if seq.request and not self.is_live(seq.request.request_id):
                self.reports.pop(seq.request.request_id, None)

    # ---- small helpers

    def _busy(self, request_id: str) -> Failed | None:
        if len(self.waiting) < self.limits.max_waiting:
            return None
        return Failed(
            request_id, Overloaded(f"{len(self.waiting)} requests are waiting here; try again later")
        )

    def _new(self, seq_id: str, token_ids: tuple[int, ...], cache_salt: str) -> Sequence:
        hasher = BlockHasher(self.namespace, cache_salt, self.limits.block_size)
        hasher.extend(token_ids)
        order = self._next_order()
        return Sequence(seq_id, list(token_ids), len(token_ids), hasher, order, self._clock())

    def _next_order(self) -> int:
        self._order += 1
        return self._order

    def _of(self, request_id: str, index: int | None) -> list[Sequence]:
        everything = [*self.waiting, *self.loading.values(), *self.running]
        return [
            s
            for s in everything
            if (s.request.request_id if s.request else s.seq_id) == request_id
            and (index is None or (s.index == index and s.width == 1))
        ]

    @staticmethod
    def _insert(queue: list[Sequence], seq: Sequence) -> None:
        """Keep a queue in order of arrival."""
        at = next((i for i, other in enumerate(queue) if other.order > seq.order), len(queue))
        queue.insert(at, seq)
