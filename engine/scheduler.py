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
from engine.budget import budget_within, cap_rows, share_budget
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
from engine.step_fit import StepLoad, StepTimes
from engine.wait_queue import WaitQueue, insert

MAX_PASSED_OVER = 32
"""How often later arrivals may be admitted before a request that does not fit yet."""

RESUMED_FIRST = 2**62
"""Taken from the order of what goes on from elsewhere: before all others, among its own as it came."""

TARGET_SHARE = 0.9
"""Of a target for a step's length that is planned for: steps vary."""

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
        times: StepTimes | None = None,
    ) -> None:
        """`times`: what is known of how long steps take; nothing yet where it is None."""
        self.pool, self.limits, self._namespace, self._clock = pool, limits, namespace, clock
        self._pager = Pager(pool, limits.block_size, store or NoStore(), limits.sliding_window)
        self.times = times or StepTimes(limits.max_num_batched_tokens, limits.max_num_seqs)
        self.waiting = WaitQueue()
        self.loading: dict[str, Sequence] = {}
        self.running: list[Sequence] = []
        self.held: dict[str, Sequence] = {}
        self.reports: dict[str, LoadReport] = {}
        self.num_preempted = self.num_queried = self.num_hit = self.num_hash_mismatches = 0
        self._order = 0
        self._pending: list[Event] = []

    # ---- what comes in

    def add(
        self,
        request: Request,
        num_held: int = 0,
        matcher: Matcher | None = None,
        arrived_s: float | None = None,
    ) -> Failed | None:
        """Queue a request, or say why not: it can never fit, or the queue is full. `arrived_s`: see
        `engine.messages.Add`."""
        prompt, answer = len(request.prompt_token_ids), request.sampling.max_tokens
        what = f"prompt ({prompt} tokens) and max_tokens ({answer})"
        width = 1 if request.resumed else request.sampling.n  # choices that go on may do so one by one
        if error := self._refusal(prompt + answer, what, width):
            return Failed(request.request_id, error)
        seq = self._new(f"{request.request_id}/0", request.prompt_token_ids, request.cache_salt)
        seq.request, seq.matcher = request, matcher
        if arrived_s is not None:
            seq.arrived_s = arrived_s
        if not request.sampling.prompt_logprobs:  # which need every row of logits
            seq.wants_remote, seq.num_held = request.prefill is not None, num_held
        if request.block_hashes and list(request.block_hashes) != seq.hasher.hashes:
            self.num_hash_mismatches += 1
        if request.resumed:
            self._resume(seq, request)
        else:
            self._queue(seq)
        return None

    def _resume(self, seq: Sequence, request: Request) -> None:
        """Queue the choices of a request that was lost elsewhere, each as if it had been preempted here after
        what it has generated. They are older than all that wait here, and their clients in mid-answer."""
        for index, output in request.resumed:
            choice = seq.fork(index, self._next_order() - RESUMED_FIRST)
            choice.tokens += output
            choice.hasher.extend(output)
            choice.wants_remote, choice.num_held = seq.wants_remote, seq.num_held
            self._queue(choice)

    def add_prefill(self, job: PrefillJob, num_held: int = 0) -> Failed | None:
        """Queue a prefill job, or say why not."""
        length = len(job.token_ids)
        if error := self._refusal(length, f"the prompt's {length} tokens"):
            return Failed(job.job_id, error)
        seq = self._new(job.job_id, job.token_ids, job.cache_salt)
        seq.num_held = num_held
        self._queue(seq)
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
        every_row = [s.wants_every_row for s in prompts]
        wanted = cap_rows([s.num_to_compute for s in prompts], every_row, MAX_PROMPT_LOGPROBS)
        shares = share_budget(wanted, self._budget(plan.chunks, prompts, wanted))
        for seq, count in zip(prompts, shares, strict=True):
            if count:
                last = count == seq.num_to_compute and not seq.is_prefill_job
                plan.chunks.append(Chunk(seq, seq.num_computed, count, sample=last))
        return plan

    def _budget(self, decodes: list[Chunk], prompts: list[Sequence], wanted: list[int]) -> int:
        """Prompt tokens of this step: as many as the limits allow, and as those that decode beside them and
        have a target can bear."""
        most = max(self.limits.max_num_batched_tokens - len(decodes), 1)
        targets = [r.itl_slo_s for chunk in decodes if (r := chunk.seq.request) and r.itl_slo_s]
        if not targets or not prompts:
            return most
        load = StepLoad.of((chunk.start, chunk.count) for chunk in decodes)
        model = self.times.prefill.beside(self.times.decode, load.sequences, load.context)
        step_s = TARGET_SHARE * min(targets)
        return budget_within(step_s, model, [s.num_computed for s in prompts], wanted, most)

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

    def tokens_ahead(self) -> tuple[int, int]:
        """Tokens to compute of prompts and of what was preempted, but for those about to be loaded; tokens
        that the sequences which decode attend to."""
        queued, context = self.waiting.num_tokens, 0
        for seq in self.loading.values():
            queued += len(seq.tokens) - seq.load_until * self.limits.block_size
        for seq in self.running:
            if seq.decoding:
                context += len(seq.tokens)
            else:
                queued += seq.num_to_compute
        return queued, context

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
            if self._awaits_prompt(seq) or self._awaits_load(seq):
                continue
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
        self.waiting.remove(seq)
        self._pager.reserve(seq, cached)
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

    def _awaits_prompt(self, seq: Sequence) -> bool:
        """Whether another choice is just making the blocks of their prompt: soon they can be shared."""
        if seq.request is None or not seq.request.resumed or not self.pool.caching:
            return False
        size = self.limits.block_size
        shared = num_shareable_blocks(seq.num_prompt, size) * size
        siblings = (s for s in [*self.running, *self.loading.values()] if s.request is seq.request)
        return any(sibling.num_computed < shared for sibling in siblings)

    def _awaits_load(self, seq: Sequence) -> bool:
        """Whether a block that tiers hold for it is just being loaded for another: soon they can share it."""
        if not seq.num_held or not self.pool.caching:
            return False
        size, hashes = self.limits.block_size, seq.hasher.hashes
        until = min(seq.num_held, self._pager.num_reusable(seq))
        for other in self.loading.values():
            coming = other.num_computed // size
            if other.aborted or coming >= min(other.load_until, until):
                continue
            if hashes[coming] == other.hasher.hashes[coming]:
                return True
        return False

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
        seq.state, seq.load_first, seq.load_until = State.LOADING, num_cached, until
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
                seq.index,
            )
        )
        return True

    def _loadable(self, seq: Sequence, num_cached: int) -> int:
        """Up to which block a source may have, or be asked to make, what the pool lacks."""
        until = min(seq.num_held, self._pager.num_reusable(seq))
        request = seq.request
        if request is None or request.prefill is None or not seq.wants_remote:
            return until
        reusable = self._pager.num_reusable(seq)
        missing = (reusable - num_cached) * self.limits.block_size
        return reusable if missing >= max(1, request.prefill.min_tokens) else until

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
        self._queue(seq)

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
        insert(self.running, seq)

    def _hold(self, seq: Sequence) -> None:
        seq.state = State.HELD
        self.held[seq.seq_id] = seq

    def _queue(self, seq: Sequence) -> None:
        """Tokens that a tier holds or that a prefill worker is asked for are not computed here."""
        self.waiting.add(seq, len(seq.tokens) - self._loadable(seq, num_cached=0) * self.limits.block_size)
