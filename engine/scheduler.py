"""Decides what each step computes. Pure bookkeeping: no model, no network, no waiting.

Each step takes every decoding sequence first, then prompts up to the token budget. A prompt's
blocks are reserved as a whole when it is admitted; output blocks are taken one at a time, and when
none is left the youngest running sequence is preempted: its blocks go back (still in the prefix
cache), it waits at the head of the queue and later continues as if it had never stopped.

    engine.books      where each sequence stands; draws how it moves
    engine.admission  which waiting ones are taken up, and what is loaded for them
    engine.budget     how the prompts of a step share its tokens
    engine.paging     which blocks each one holds
"""

from __future__ import annotations

from core.blocks import BlockHasher
from core.clock import Clock, monotonic
from core.errors import BatonError
from core.request import Request
from engine.admission import Admission
from engine.block_pool import BlockPool, NoFreeBlocks
from engine.books import Books
from engine.budget import budget_within, cap_rows, share_budget
from engine.matcher import Matcher
from engine.messages import Event, Failed, LoadCancelled, LoadReport
from engine.paging import BlockStore, NoStore, Pager
from engine.prefill_jobs import publish, start_job
from engine.refusals import refusal
from engine.sequence import PrefillJob, Sequence, State
from engine.step import MAX_PROMPT_LOGPROBS, Chunk, Limits, StepPlan
from engine.step_fit import StepLoad, StepTimes

RESUMED_FIRST = 2**62
"""Taken from the order of what goes on from elsewhere: before all others, among its own as it came."""

TARGET_SHARE = 0.9
"""Of a target for a step's length that is planned for: steps vary."""


class Scheduler:
    """Moves one worker's sequences on. `reports`: of finished loads by request, until its first token."""

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
        self.books = Books()
        self.admission = Admission(self.books, self._pager, limits)
        self.reports: dict[str, LoadReport] = {}
        self.num_preempted = self.num_hash_mismatches = 0
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
        seq = self._new(f"{request.request_id}/0", request.prompt_token_ids, request.cache_salt, arrived_s)
        seq.request, seq.matcher = request, matcher
        if not request.sampling.prompt_logprobs:  # which need every row of logits
            seq.wants_remote, seq.num_held = request.prefill is not None, num_held
        if request.block_hashes and list(request.block_hashes) != seq.hasher.hashes:
            self.num_hash_mismatches += 1
        if request.resumed:
            self._resume(seq, request)
        else:
            self.admission.queue(seq)
        return None

    def _resume(self, seq: Sequence, request: Request) -> None:
        """Queue the choices of a request that was lost elsewhere, each as if it had been preempted here after
        what it has generated. They are older than all that wait here, and their clients in mid-answer."""
        for index, output in request.resumed:
            choice = seq.fork(index, self.books.next_order() - RESUMED_FIRST)
            choice.tokens += output
            choice.hasher.extend(output)
            choice.wants_remote, choice.num_held = seq.wants_remote, seq.num_held
            self.admission.queue(choice)

    def add_prefill(
        self, job: PrefillJob, num_held: int = 0, arrived_s: float | None = None
    ) -> Failed | None:
        """Queue a prefill job, or say why not."""
        length = len(job.token_ids)
        if error := self._refusal(length, f"the prompt's {length} tokens"):
            return Failed(job.job_id, error)
        seq = self._new(job.job_id, job.token_ids, job.cache_salt, arrived_s)
        seq.num_held = num_held
        self.admission.queue(seq)
        return None

    def abort(self, request_id: str, index: int | None = None) -> None:
        """End what belongs to this id; idempotent. Blocks in flight stay until the load is finished."""
        if held := self.books.held.pop(request_id, None):
            self._finish(held)
        for seq in self.books.of(request_id, index):
            if seq.state is State.LOADING:
                if not seq.aborted:
                    seq.aborted = True
                    self._pending.append(LoadCancelled(seq.seq_id))
                continue
            (self.books.waiting if seq.state is State.WAITING else self.books.running).remove(seq)
            self._finish(seq)

    def blocks_arrived(self, load_id: str, count: int, from_store: int) -> None:
        """The first `count` blocks of a running load are verified and may be shared."""
        seq = self.books.loading.get(load_id)
        if seq is not None and not seq.aborted:
            self._pager.mark_arrived(seq, count, from_store)
            if seq.is_prefill_job:
                self._pending += publish(seq, self.limits.block_size, self._clock(), cached=True)

    def load_finished(self, load_id: str, report: LoadReport) -> None:
        """A load is over: the sequence computes whatever did not arrive."""
        seq = self.books.loading.pop(load_id, None)
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
            self._pending += start_job(seq, self.books, self.limits.block_size, self._clock())
        else:
            if seq.num_output == 0:
                self.reports[seq.request_id] = report
            self.books.run(seq)

    # ---- one step

    def schedule(self) -> StepPlan:
        """Choose the next step's work and reserve its blocks."""
        plan = StepPlan(events=self._pending)
        self._pending = []
        now = self._clock()
        for seq in [s for s in self.books.running if s.decoding]:
            if seq.state is State.RUNNING and self._make_room(seq, plan):
                plan.chunks.append(Chunk(seq, seq.num_computed, 1, sample=True))
        plan.events += self.admission.admit(now)
        planned = {chunk.seq for chunk in plan.chunks}
        # Prompts, and whoever was preempted and found all but its last tokens in the cache.
        prompts = [s for s in self.books.running if s not in planned and s.num_to_compute > 0]
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
        events = publish(seq, self.limits.block_size, now, cached=False)
        if seq.num_to_compute == 0:
            self.books.running.remove(seq)
            self.books.hold(seq)
        return events

    def fork(self, seq: Sequence) -> list[Sequence]:
        """All n choices of a sequence whose prompt is complete, itself first; blocks become shared."""
        forks = []
        for index in range(1, seq.width):
            child = seq.fork(index, self.books.next_order())
            self.pool.acquire(child.live_blocks)
            self.books.run(child)
            forks.append(child)
        return [seq, *forks]

    def finish(self, seq: Sequence) -> None:
        """A running sequence is done; its blocks go back (the full ones stay in the prefix cache)."""
        if seq in self.books.running:
            self.books.running.remove(seq)
        self._finish(seq)

    # ---- blocks

    def _make_room(self, seq: Sequence, plan: StepPlan) -> bool:
        """A writable slot for the next token, by preempting the youngest if need be; False: this one was."""
        while not self._pager.has_slot(seq):
            try:
                copy = self._pager.take_slot(seq)
            except NoFreeBlocks:
                victim = max((s for s in self.books.running if not s.is_prefill_job), key=lambda s: s.order)
                self._preempt(victim)
                if victim is seq:
                    return False
            else:
                if copy:
                    plan.copies.append(copy)
        return True

    def _preempt(self, seq: Sequence) -> None:
        self.books.running.remove(seq)
        self._pager.park(seq)
        self._wait(seq)
        self.num_preempted += 1

    def _wait(self, seq: Sequence) -> None:
        self._pager.give_back(seq)
        if seq.num_output == 0:  # where its prompt's KV comes from is decided anew
            seq.num_cached = seq.num_loaded = 0
            self.reports.pop(seq.request_id, None)
        self.admission.queue(seq)

    def _finish(self, seq: Sequence) -> None:
        if seq.state is not State.FINISHED:
            seq.state = State.FINISHED
            self._pager.give_back(seq)
            self._pager.unpark(seq)
            if seq.request and not self.books.is_live(seq.request.request_id):
                self.reports.pop(seq.request.request_id, None)

    # ---- small helpers

    def _refusal(self, num_tokens: int, what: str, width: int = 1) -> BatonError | None:
        return refusal(self.limits, self.pool.num_blocks, len(self.books.waiting), num_tokens, what, width)

    def _new(
        self, seq_id: str, token_ids: tuple[int, ...], cache_salt: str, arrived_s: float | None
    ) -> Sequence:
        hasher = BlockHasher(self._namespace, cache_salt, self.limits.block_size)
        hasher.extend(token_ids)
        order = self.books.next_order()
        arrived_s = self._clock() if arrived_s is None else arrived_s
        return Sequence(seq_id, list(token_ids), len(token_ids), hasher, order, arrived_s)
