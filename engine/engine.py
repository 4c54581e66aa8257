"""One worker's engine. A step is three verbs: schedule, run, advance."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Protocol, TypeVar

import torch

from core import faults, log
from core.clock import Clock, monotonic
from core.errors import BatonError, EngineFault, InvalidParameter, WorkerLost
from core.request import FinishReason, Gathered, TokenDelta, TokenLogprob
from engine import sampler
from engine.batch import Batch
from engine.batch import Chunk as BatchChunk
from engine.messages import (
    Abort,
    Add,
    AddPrefill,
    BlocksArrived,
    Command,
    EngineStats,
    Event,
    Failed,
    LoadFinished,
    LoadReport,
    Quiet,
)
from engine.sampler import Draw
from engine.scheduler import Scheduler
from engine.sequence import Sequence as Seq
from engine.sequence import State
from engine.step import Chunk, StepPlan
from engine.step_fit import StepLoad

_log = log.get("engine")

_Work = TypeVar("_Work")


class Runner(Protocol):
    """What the engine needs of a model: see `engine.runner.ModelRunner`."""

    def run(self, batch: Batch) -> torch.Tensor:
        """fp32 logits `[rows, vocab]` in chunk order; writes K/V of all tokens into the pool."""
        ...

    def copy_block(self, src: int, dst: int) -> None:
        """Copy one whole block inside the pool."""
        ...


class Engine:
    """Joins scheduler, model and sampler. Not thread-safe: `engine.loop` owns it."""

    def __init__(
        self,
        scheduler: Scheduler,
        runner: Runner,
        emit: Callable[[list[Event]], None],
        clock: Clock = monotonic,
    ) -> None:
        self.scheduler, self._runner, self._emit, self._clock = scheduler, runner, emit, clock
        self._prompt_logprobs: dict[str, list[TokenLogprob]] = {}
        self.steps = self.step_failures = 0

    def handle(self, command: Command) -> None:
        """Apply one command; what follows from it is emitted at once or with the next step.

        Add and AddPrefill never raise, they are answered by Failed. When another command raises, the
        books can no longer be trusted.
        """
        scheduler = self.scheduler
        match command:
            case Add(request, num_held, matcher, arrived_s):
                add = partial(scheduler.add, matcher=matcher, arrived_s=arrived_s)
                self._take_up(request.request_id, add, request, num_held)
            case AddPrefill(job, num_held, arrived_s):
                self._take_up(job.job_id, partial(scheduler.add_prefill, arrived_s=arrived_s), job, num_held)
            case Abort(request_id, index):
                scheduler.abort(request_id, index)
                if index is None:
                    self._prompt_logprobs.pop(request_id, None)
            case BlocksArrived(load_id, count, from_store):
                scheduler.blocks_arrived(load_id, count, from_store)
            case LoadFinished(load_id, report):
                scheduler.load_finished(load_id, report)
            case Quiet(block_ids):
                scheduler.pool.quiet(block_ids)

    def fail_all(self, error: BatonError, also: Iterable[str] = ()) -> None:
        """Emit Failed for every request and job that is open here, and for those in `also`.

        Changes no books: call it when they are broken and the engine will not step again.
        """
        self._emit([Failed(i, error) for i in dict.fromkeys([*self.scheduler.books.open_ids(), *also])])

    def step(self) -> bool:
        """Run one step; False when there was nothing to compute.

        A model or sampler that raises ends the step's requests only; everything else is raised, also what
        the accelerator reports and the loss of a rank: every later step would fail.
        """
        started = self._clock()
        plan = self.scheduler.schedule()
        if plan.events:
            self._emit(plan.events)
        if not plan.chunks:
            return False
        try:
            logits = self._run(plan)
            events = self._advance(plan, logits)
            took = self._clock() - started
        except (torch.AcceleratorError, WorkerLost):
            raise
        except Exception as error:
            events = self._fail(plan, error)
        else:
            self._measure(plan, took)
        self.steps += 1
        if events:
            self._emit(events)
        return True

    def stats(self) -> EngineStats:
        s, pool, books = self.scheduler, self.scheduler.pool, self.scheduler.books
        queued, context = books.tokens_ahead(s.limits.block_size)
        return EngineStats(
            total_blocks=pool.num_blocks,
            free_blocks=pool.num_free,
            cached_blocks=pool.num_cached,
            quarantined_blocks=pool.num_quarantined,
            running=len(books.running),
            waiting=len(books.waiting),
            loading=len(books.loading),
            held=len(books.held),
            steps=self.steps,
            queued_tokens=queued,
            context_tokens=context,
            prefill_model=s.times.prefill,
            decode_model=s.times.decode,
            preemptions=s.num_preempted,
            prefix_queries=s.admission.num_queried,
            prefix_hits=s.admission.num_hit,
            evicted_blocks=pool.num_evicted,
            step_failures=self.step_failures,
            hash_mismatches=s.num_hash_mismatches,
        )

    def _take_up(
        self, request_id: str, add: Callable[[_Work, int], Failed | None], work: _Work, num_held: int
    ) -> None:
        try:
            failed = add(work, num_held)
        except Exception as error:  # it was not queued: whatever is wrong with it hits nobody else
            self.step_failures += 1
            _log.error("engine.add_failed", request_id=request_id, exc_info=error)
            reason = f"the engine could not take up the request ({type(error).__name__}); check its values"
            failed = Failed(request_id, EngineFault(reason))
        if failed:
            self._emit([failed])

    def _measure(self, plan: StepPlan, took: float) -> None:
        load = StepLoad.of((chunk.start, chunk.count) for chunk in plan.chunks)
        self.scheduler.times.measured(load, took)

    # ---- run

    def _run(self, plan: StepPlan) -> torch.Tensor:
        for src, dst in plan.copies:
            self._runner.copy_block(src, dst)
        faults.hit("engine.step")
        return self._runner.run(
            Batch.build(
                [self._as_batch_chunk(chunk) for chunk in plan.chunks],
                self.scheduler.limits.block_size,
            )
        )

    def _as_batch_chunk(self, chunk: Chunk) -> BatchChunk:
        seq, end = chunk.seq, chunk.start + chunk.count
        logits_from = chunk.count - 1 if chunk.sample else None
        if seq.wants_every_row:
            logits_from = 0
        return BatchChunk(seq.tokens[chunk.start : end], chunk.start, seq.block_table, logits_from)

    # ---- advance

    def _advance(self, plan: StepPlan, logits: torch.Tensor) -> list[Event]:
        now, events, row = self._clock(), [], 0
        draws: list[Draw] = []
        for chunk in plan.chunks:
            seq = chunk.seq
            if seq.wants_every_row:
                self._keep_prompt_logprobs(chunk, logits[row : row + chunk.count])
                row += chunk.count
            elif chunk.sample:
                row += 1
            if chunk.sample:
                draws += [Draw(row - 1, seq, i) for i in self._indices(seq)]
        chosen = sampler.sample(logits, draws)
        for chunk in plan.chunks:
            events += self.scheduler.computed(chunk, now)
        at = 0
        for seq in (chunk.seq for chunk in plan.chunks if chunk.sample):
            first = seq.num_output == 0 and not (seq.request and seq.request.resumed)
            for choice in self.scheduler.fork(seq):
                token_id, logprob = chosen[at]
                at += 1
                if choice.state is not State.FINISHED:  # another choice of the request broke just now
                    events.append(self._append(choice, token_id, logprob, now if first else None))
                first = False
        return events

    @staticmethod
    def _indices(seq: Seq) -> Sequence[int]:
        return range(seq.width) if seq.width > 1 else (seq.index,)

    def _append(
        self, seq: Seq, token_id: int, logprob: TokenLogprob | None, first_at: float | None
    ) -> TokenDelta | Failed:
        params, request = seq.sampling, seq.request
        assert request is not None
        seq.append(token_id)
        matcher = seq.caught_up_matcher()
        if matcher and matcher.error:
            return self._leave_grammar(seq, matcher.error)
        finish = None
        if token_id in params.stop_token_ids or (matcher and matcher.finished):
            finish = FinishReason.STOP
        elif seq.num_output >= params.max_tokens:
            finish = FinishReason.LENGTH
        gathered, prompt = None, ()
        if first_at is not None:
            gathered, prompt = self._gathered(seq, first_at), self._take_prompt_logprobs(seq)
        if finish:
            self.scheduler.finish(seq)
        return TokenDelta(
            request.request_id,
            seq.index,
            (token_id,),
            (logprob,) if logprob else (),
            finish,
            gathered,
            prompt,
        )

    def _gathered(self, seq: Seq, now: float) -> Gathered:
        assert seq.request is not None
        assert seq.first_scheduled_s is not None
        report = self.scheduler.reports.pop(seq.request.request_id, None) or LoadReport(0)
        size = self.scheduler.limits.block_size
        by_tier = tuple((tier, count * size) for tier, count in report.by_tier)
        of_tiers = sum(tokens for _, tokens in by_tier)
        remote = seq.num_loaded - of_tiers
        return Gathered(
            cached_tokens=seq.num_cached,
            tier_tokens=by_tier,
            remote_tokens=remote,
            remote_cached_tokens=min(remote, report.remote_cached_blocks * size),
            computed_tokens=seq.num_prompt - seq.num_cached - seq.num_loaded,
            queue_s=seq.first_scheduled_s - seq.arrived_s,
            transfer_nbytes=report.nbytes,
            transfer_s=report.transfer_s,
            transfer_exposed_s=report.exposed_s,
            last_block_to_token_s=now - report.last_block_at if report.last_block_at else 0.0,
            remote_queue_s=report.remote_queue_s,
            prefill_s=now - seq.first_scheduled_s,
            source_error=report.error,
            source_plan=report.plan,
        )

    # ---- prompt log probabilities

    def _keep_prompt_logprobs(self, chunk: Chunk, rows: torch.Tensor) -> None:
        """Rows predict the tokens after each position of the chunk, as far as they are prompt."""
        seq = chunk.seq
        assert seq.request is not None
        following = seq.tokens[chunk.start + 1 : chunk.start + chunk.count + 1]
        counts = [seq.sampling.logprobs or 0] * len(following)
        kept = sampler.logprobs_of(rows[: len(following)], following, counts)
        so_far = self._prompt_logprobs.setdefault(seq.request.request_id, [])
        del so_far[chunk.start :]  # a preempted prompt starts over
        so_far += kept

    def _take_prompt_logprobs(self, seq: Seq) -> tuple[TokenLogprob | None, ...]:
        assert seq.request is not None
        kept = self._prompt_logprobs.pop(seq.request.request_id, None)
        return (None, *kept) if kept is not None else ()

    # ---- faults

    def _leave_grammar(self, seq: Seq, reason: str) -> Failed:
        """The grammar proved too complex on the way: the client's business, and this request's end."""
        grammar = seq.sampling.grammar
        assert grammar is not None
        self.scheduler.abort(seq.request_id)
        self._prompt_logprobs.pop(seq.request_id, None)
        message = f"{grammar.param}: after {seq.num_output - 1} tokens of the answer: {reason}"
        return Failed(seq.request_id, InvalidParameter(message, param=grammar.field))

    def _fail(self, plan: StepPlan, error: Exception) -> list[Event]:
        """The step broke: its requests are over, everybody else goes on."""
        self.step_failures += 1
        _log.error("engine.step_failed", error=repr(error), exc_info=error)
        known = error if isinstance(error, BatonError) else None
        failed: dict[str, Event] = {}
        for chunk in plan.chunks:
            request_id = chunk.seq.request_id
            fault = known or EngineFault(f"the engine failed in a step ({type(error).__name__}); try again")
            failed[request_id] = Failed(request_id, fault)
            self.scheduler.abort(request_id)
            self._prompt_logprobs.pop(request_id, None)
        return list(failed.values())
