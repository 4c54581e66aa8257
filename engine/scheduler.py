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

from core.blocks import BlockHasher, num_shareable_blocks
from core.clock import Clock, monotonic
from core.errors import BatonError
from core.request import Request
from engine.block_pool import BlockPool, NoFreeBlocks
from engine.budget import cap_rows, share_budget
from engine.matcher import Matcher
from engine.messages import (
    BlocksBuilt,
    Event,
    Failed,
    LoadCancelled,
    LoadOrdered,
    LoadReport,
)
from engine.paging import BlockStore, NoStore, Pager
from engine.refusals import refusal
from engine.sequence import PrefillJob, Sequence, State
from engine.step import MAX_PROMPT_LOGPROBS, Chunk, Limits, StepPlan

MAX_PASSED_OVER = 32
"""How often later arrivals may be admitted before a request that does not fit yet."""

MAX_MISFITS = 8
"""How many requests that do not fit one step looks at; a look-up compares a whole prompt."""


class Scheduler:
    """All sequences of one worker and their place in its pool."""

    def __init__(
        self,
        pool: BlockPool,
        limits: Limits,
        namespace: bytes,
        clock: Clock = monotonic,
        store: BlockStore | None = None,
    ) -> None:
        self.pool, self.limits, self._namespace, self._clock = pool, limits, namespace, clock
        self._pager = Pager(pool, limits.block_size, store or NoStore(), limits.sliding_window)
        self.waiting: list[Sequence] = []
        self.loading: dict[str, Sequence] = {}
        self.running: list[Sequence] = []
        self.held: dict[str, Sequence] = {}
        self.reports: dict[str, LoadReport] = {}
        self.num_preempted = self.num_queried = self.num_hit = self.num_hash_mismatches = 0
        self._order = 0
        self._pending: list[Event] = []

    # ---- what comes in

    def add(self, request: Request, num_held: int = 0, matcher: Matcher | None = None) -> Failed | None:
        """Queue a request, or say why not: it can never fit, or the queue is full."""
        prompt, answer = len(request.prompt_token_ids), request.sampling.max_tokens
        what = f"prompt ({prompt} tokens) and max_tokens ({answer})"
        if error := self._refusal(prompt + answer, what, request.sampling.n):
            return Failed(request.request_id, error)
        seq = self._new(f"{request.request_id}/0", request.prompt_token_ids, request.cache_salt)
        seq.request, seq.matcher = request, matcher
        if not request.sampling.prompt_logprobs:  # which need every row of logits
            seq.wants_remote, seq.num_held = request.prefill is not None, num_held
        if request.block_hashes and list(request.block_hashes) != seq.hasher.hashes:
            self.num_hash_mismatches += 1
        self.waiting.append(seq)
        return None

    def add_prefill(self, job: PrefillJob, num_held: int = 0) -> Failed | None:
        """Queue a prefill job, or say why not."""
        length = len(job.token_ids)
        if error := self._refusal(length, f"the prompt's {length} tokens"):
            return Failed(job.job_id, error)
        seq = self._new(job.job_id, job.token_ids, job.cache_salt)
        seq.num_held = num_held
        self.waiting.append(seq)
        return None

    def abort(self, request_id: str, index: int | None = None) -> None:
        """End what belongs to this id; idempotent. Blocks in flight stay until the load is finished."""
        if held := self.held.pop(request_id, None):
            self._finish(held)
        for seq in self._of(request_id, index):
            if seq.state is State.LOADING:
                if not seq.aborted:
                    seq.aborted = True
                    self._pending.append(LoadCancelled(seq.seq_id))
                continue
            (self.waiting if seq.state is State.WAITING else self.running).remove(seq)
            self._finish(seq)

    def blocks_arrived(self, load_id: str, count: int, from_store: int) -> None:
        """The first `count` blocks of a running load are verified and may be shared."""
        seq = self.loading.get(load_id)
        if seq is not None and not seq.aborted:
            self._pager.mark_arrived(seq, count, from_store)
            if seq.is_prefill_job:
                self._pending += self._publish(seq, self._clock(), cached=True)

    def load_finished(self, load_id: str, report: LoadReport) -> None:
        """A load is over: the sequence computes whatever did not arrive."""
        seq = self.loading.pop(load_id, None)
        if seq is None:
            return
        if not seq.aborted:
            self._pager.mark_arrived(seq, report.arrived, sum(count for _, count in report.by_tier))
        complete = not report.unquiet or self._pager.replace(seq, frozenset(report.unquiet))
        self._pager.unpark(seq)
        if seq.aborted:
            self._finish(seq)
        elif not complete:
            self._wait(seq)
        elif seq.is_prefill_job:
            self._pending += self._start_job(seq, self._clock())
        else:
            if seq.num_output == 0:
                self.reports[seq.request_id] = report
            self._run(seq)

    # ---- one step

    def schedule(self) -> StepPlan:
        """Choose the next step's work and reserve its blocks."""
        plan = StepPlan(events=self._pending)
        self._pending = []
        now = self._clock()
        for seq in [s for s in self.running if s.decoding]:
            if seq.state is State.RUNNING and self._make_room(seq, plan):
                plan.chunks.append(Chunk(seq, seq.num_computed, 1, sample=True))
        self._admit(plan, now)
        planned = {chunk.seq for chunk in plan.chunks}
        # Prompts, and whoever was preempted and found all but its last tokens in the cache.
        prompts = [s for s in self.running if s not in planned and s.num_to_compute > 0]
        budget = max(self.limits.max_num_batched_tokens - len(plan.chunks), 1)
        every_row = [s.wants_every_row for s in prompts]
        wanted = cap_rows([s.num_to_compute for s in prompts], every_row, MAX_PROMPT_LOGPROBS)
        shares = share_budget(wanted, budget)
        for seq, count in zip(prompts, shares, strict=True):
            if count:
                last = count == seq.num_to_compute and not seq.is_prefill_job
                plan.chunks.append(Chunk(seq, seq.num_computed, count, sample=last))
        return plan

    def computed(self, chunk: Chunk, now: float) -> list[Event]:
        """The chunk's KV stands in the pool: commit its full blocks, publish those of a prefill job.

        Blocks that fell out of the sliding window go back.
        """
        seq = chunk.seq
        seq.num_computed += chunk.count
        self._pager.commit(seq)
        self._pager.drop_fallen(seq)
        if not seq.is_prefill_job:
            return []
        events = self._publish(seq, now, cached=False)
        if seq.num_to_compute == 0:
            self.running.remove(seq)
            self._hold(seq)
        return events

    def fork(self, seq: Sequence) -> list[Sequence]:
        """All n choices of a sequence whose prompt is complete, itself first; blocks become shared."""
        forks = []
        for index in range(1, seq.width):
            child = seq.fork(index, self._next_order())
            self.pool.acquire(child.live_blocks)
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

    def open_ids(self) -> list[str]:
        """Ids of all requests and jobs that still expect an answer or hold blocks for a peer."""
        everything = [*self.waiting, *self.loading.values(), *self.running, *self.held.values()]
        return list(dict.fromkeys(seq.request_id for seq in everything if not seq.aborted))

    # ---- admission

    def _admit(self, plan: StepPlan, now: float) -> None:
        """Take up waiting sequences in order; one that does not fit yet may be passed over, not for ever."""
        blocked: list[Sequence] = []
        for seq in list(self.waiting):
            active = sum(other.width for other in [*self.running, *self.loading.values()])
            if active and active + seq.width > self.limits.max_num_seqs:
                break
            if self.pool.num_free <= self._growth() or len(blocked) == MAX_MISFITS:
                break
            if self._admit_one(seq, plan, now):
                for other in blocked:
                    other.num_passed_over += 1
            else:
                blocked.append(seq)
            if any(other.num_passed_over >= MAX_PASSED_OVER for other in blocked):
                break

    def _admit_one(self, seq: Sequence, plan: StepPlan, now: float) -> bool:
        cached = self._pager.lookup(seq)
        if not self._pager.fits(seq, cached, spare=self._growth()):
            return False
        self._pager.reserve(seq, cached)
        self.waiting.remove(seq)
        seq.num_passed_over = 0
        if self.pool.caching:
            self.num_queried += len(seq.tokens)
            self.num_hit += seq.num_computed
        if seq.first_scheduled_s is None:
            seq.first_scheduled_s = now
        if seq.num_output == 0:
            seq.num_cached = seq.num_computed
        if self._order_load(seq, plan, len(cached)):
            return True
        self._pager.unpark(seq)
        if seq.is_prefill_job:
            plan.events += self._start_job(seq, now)
        else:
            self._run(seq)
        return True

    def _growth(self) -> int:
        """Blocks to leave free: every running sequence that generates may want its next one soon."""
        return sum(not seq.is_prefill_job for seq in self.running)

    def _start_job(self, seq: Sequence, now: float) -> list[Event]:
        if seq.num_to_compute:
            self._run(seq)
        else:
            self._hold(seq)
        return self._publish(seq, now, cached=True)

    def _order_load(self, seq: Sequence, plan: StepPlan, num_cached: int) -> bool:
        remote, until = seq.wants_remote, self._loadable(seq, num_cached)
        # Asked once: what does not come is computed, and so is the rest after a preemption.
        seq.wants_remote, seq.num_held = False, 0
        if until <= num_cached:
            return False
        seq.state, seq.load_first = State.LOADING, num_cached
        self.loading[seq.seq_id] = seq
        plan.events.append(
            LoadOrdered(
                seq.seq_id,
                seq.request_id,
                num_cached,
                tuple(seq.block_table[num_cached:until]),
                tuple(seq.hasher.hashes[num_cached:until]),
                remote,
                bool(seq.parked),
            )
        )
        return True

    def _loadable(self, seq: Sequence, num_cached: int) -> int:
        """Up to which block a source may have, or be asked to make, what the pool lacks."""
        until = min(seq.num_held, self._pager.num_reusable(seq))
        request = seq.request
        if request is None or request.prefill is None or not seq.wants_remote:
            return until
        of_prompt = num_shareable_blocks(seq.num_prompt, self.limits.block_size)
        missing = (of_prompt - num_cached) * self.limits.block_size
        return max(until, of_prompt) if missing >= max(1, request.prefill.min_tokens) else until

    # ---- blocks

    def _make_room(self, seq: Sequence, plan: StepPlan) -> bool:
        """A writable slot for the next token, by preempting the youngest if need be; False: this one was."""
        while not self._pager.has_slot(seq):
            try:
                copy = self._pager.take_slot(seq)
            except NoFreeBlocks:
                victim = max((s for s in self.running if not s.is_prefill_job), key=lambda s: s.order)
                self._preempt(victim)
                if victim is seq:
                    return False
            else:
                if copy:
                    plan.copies.append(copy)
        return True

    def _preempt(self, seq: Sequence) -> None:
        self.running.remove(seq)
        self._pager.park(seq)
        self._wait(seq)
        self.num_preempted += 1

    def _wait(self, seq: Sequence) -> None:
        self._pager.give_back(seq)
        if seq.num_output == 0:  # where its prompt's KV comes from is decided anew
            seq.num_cached = seq.num_loaded = 0
            self.reports.pop(seq.request_id, None)
        seq.state = State.WAITING
        self._insert(self.waiting, seq)

    def _publish(self, seq: Sequence, now: float, *, cached: bool) -> list[Event]:
        first, until = seq.num_published, seq.num_computed // self.limits.block_size
        if until == first:
            return []
        seq.num_published = until
        return [BlocksBuilt(seq.seq_id, first, tuple(seq.block_table[first:until]), now, cached)]

    def _finish(self, seq: Sequence) -> None:
        if seq.state is not State.FINISHED:
            seq.state = State.FINISHED
            self._pager.give_back(seq)
            self._pager.unpark(seq)
            if seq.request and not self.is_live(seq.request.request_id):
                self.reports.pop(seq.request.request_id, None)

    # ---- small helpers

    def _refusal(self, num_tokens: int, what: str, width: int = 1) -> BatonError | None:
        return refusal(self.limits, self.pool.num_blocks, len(self.waiting), num_tokens, what, width)

    def _new(self, seq_id: str, token_ids: tuple[int, ...], cache_salt: str) -> Sequence:
        hasher = BlockHasher(self._namespace, cache_salt, self.limits.block_size)
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
            if s.request_id == request_id and (index is None or (s.index == index and s.width == 1))
        ]

    def _run(self, seq: Sequence) -> None:
        seq.state = State.RUNNING
        self._insert(self.running, seq)

    def _hold(self, seq: Sequence) -> None:
        seq.state = State.HELD
        self.held[seq.seq_id] = seq

    @staticmethod
    def _insert(queue: list[Sequence], seq: Sequence) -> None:
        """Keep a queue in order of arrival."""
        at = next((i for i, other in enumerate(queue) if other.order > seq.order), len(queue))
        queue.insert(at, seq)
