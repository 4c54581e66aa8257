"""Which waiting sequences are taken up, and which of their blocks are loaded instead of computed.

They are taken up in the order of arrival, each with blocks for all of its tokens. One that does not fit
may be passed over by later ones, but not for ever; one whose blocks are just being made or loaded for another
waits until it can share them.
"""

from __future__ import annotations

from core.blocks import num_shareable_blocks
from engine.books import Books
from engine.messages import Event, LoadOrdered
from engine.paging import Pager
from engine.prefill_jobs import start_job
from engine.sequence import Sequence
from engine.step import Limits

MAX_PASSED_OVER = 32
"""How often later arrivals may be admitted before a request that does not fit yet."""

MAX_MISFITS = 8
"""How many requests that do not fit one step looks at; a look-up compares a whole prompt."""


class Admission:
    """The way into the queue, and out of it into the pool.

    `num_queried`, `num_hit`: tokens looked up in the prefix cache on admission, and found there.
    """

    def __init__(self, books: Books, pager: Pager, limits: Limits) -> None:
        self._books, self._pager, self._limits = books, pager, limits
        self.num_queried = self.num_hit = 0

    def queue(self, seq: Sequence) -> None:
        """Tokens that a tier holds or that a prefill worker is asked for are not computed here."""
        loadable = self._loadable(seq, num_cached=0) * self._limits.block_size
        self._books.wait(seq, len(seq.tokens) - loadable)

    def admit(self, now: float) -> list[Event]:
        """Take up waiting sequences in order; one that does not fit yet may be passed over, not for ever."""
        events: list[Event] = []
        blocked: list[Sequence] = []
        for seq in list(self._books.waiting):
            if self._awaits_prompt(seq) or self._awaits_load(seq):
                continue
            active = sum(other.width for other in self._books.active)
            if active and active + seq.width > self._limits.max_num_seqs:
                break
            if self._pager.pool.num_free <= self._growth() or len(blocked) == MAX_MISFITS:
                break
            if self._admit_one(seq, events, now):
                for other in blocked:
                    other.num_passed_over += 1
            else:
                blocked.append(seq)
            if any(other.num_passed_over >= MAX_PASSED_OVER for other in blocked):
                break
        return events

    def _admit_one(self, seq: Sequence, events: list[Event], now: float) -> bool:
        cached = self._pager.lookup(seq)
        if not self._pager.fits(seq, cached, spare=self._growth()):
            return False
        self._books.waiting.remove(seq)
        self._pager.reserve(seq, cached)
        seq.num_passed_over = 0
        if self._pager.pool.caching:
            self.num_queried += len(seq.tokens)
            self.num_hit += seq.num_computed
        if seq.first_scheduled_s is None:
            seq.first_scheduled_s = now
        if seq.num_output == 0:
            seq.num_cached = seq.num_computed
        if order := self._order_load(seq, len(cached)):
            events.append(order)
            return True
        self._pager.unpark(seq)
        if seq.is_prefill_job:
            events += start_job(seq, self._books, self._limits.block_size, now)
        else:
            self._books.run(seq)
        return True

    def _growth(self) -> int:
        """Blocks to leave free: every running sequence that generates may want its next one soon."""
        return sum(not seq.is_prefill_job for seq in self._books.running)

    # ---- blocks that can be shared soon

    def _awaits_prompt(self, seq: Sequence) -> bool:
        """Whether another choice is just making the blocks of their prompt: soon they can be shared."""
        if seq.request is None or not seq.request.resumed or not self._pager.pool.caching:
            return False
        size = self._limits.block_size
        shared = num_shareable_blocks(seq.num_prompt, size) * size
        siblings = (s for s in self._books.active if s.request is seq.request)
        return any(sibling.num_computed < shared for sibling in siblings)

    def _awaits_load(self, seq: Sequence) -> bool:
        """Whether a block that tiers hold for it is just being loaded for another: soon they can share it."""
        if not seq.num_held or not self._pager.pool.caching:
            return False
        size, hashes = self._limits.block_size, seq.hasher.hashes
        until = min(seq.num_held, self._pager.num_reusable(seq))
        for other in self._books.loading.values():
            coming = other.num_computed // size
            if other.aborted or coming >= min(other.load_until, until):
                continue
            if hashes[coming] == other.hasher.hashes[coming]:
                return True
        return False

    # ---- blocks that a source has

    def _order_load(self, seq: Sequence, num_cached: int) -> LoadOrdered | None:
        remote, until = seq.wants_remote, self._loadable(seq, num_cached)
        # Asked once: what does not come is computed, and so is the rest after a preemption.
        seq.wants_remote, seq.num_held = False, 0
        if until <= num_cached:
            return None
        seq.load_first, seq.load_until = num_cached, until
        self._books.load(seq)
        return LoadOrdered(
            seq.seq_id,
            seq.request_id,
            num_cached,
            tuple(seq.block_table[num_cached:until]),
            tuple(seq.hasher.hashes[num_cached:until]),
            remote,
            bool(seq.parked),
            seq.index,
        )

    def _loadable(self, seq: Sequence, num_cached: int) -> int:
        """Up to which block a source may have, or be asked to make, what the pool lacks."""
        until = min(seq.num_held, self._pager.num_reusable(seq))
        request = seq.request
        if request is None or request.prefill is None or not seq.wants_remote:
            return until
        reusable = self._pager.num_reusable(seq)
        missing = (reusable - num_cached) * self._limits.block_size
        return reusable if missing >= max(1, request.prefill.min_tokens) else until
