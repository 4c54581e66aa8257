"""One load: what was ordered, what was chosen, what has come."""

from __future__ import annotations

from core.request import PrefillTarget, Request
from engine.messages import LoadOrdered, LoadReport
from planning.sources import Candidate, Decision, Prompt, Rest
from services.decode.remote import Ask, Brought

MAX_LISTED = 4
"""Candidates that the request record shows."""


class Load:
    """An order whose request is known, unless it is a prefill job's or its client has left.

    `num_from_tiers`: leading blocks that tiers have brought; `brought`: what the prefill worker brought
    of the blocks behind those that tiers were to bring; `gap`: what it brought in their stead.
    """

    def __init__(self, order: LoadOrdered, request: Request | None, block_size: int) -> None:
        self.order, self._request, self._block_size = order, request, block_size
        self.target: PrefillTarget | None = request.prefill if request and order.remote else None
        self.loads: tuple[tuple[str, int], ...] = ()
        self.label = self._plan = self.error = ""
        self.num_from_tiers = 0
        self.brought, self.gap = Brought(), Brought()
        self._planned = 0
        self._by_tier: dict[str, int] = {}
        self._asks = False

    def prompt(self, block_nbytes: int) -> Prompt:
        first, count = self.order.first_block, len(self.order.block_ids)
        num_tokens = (first + count) * self._block_size + 1
        return Prompt(num_tokens, first + count, self._block_size, block_nbytes, first)

    def choose(self, decision: Decision) -> None:
        """The cheapest way that the plan allows."""
        chosen = next(each for each in decision.candidates if self._allows(each))
        self.loads, self._planned = chosen.loads, chosen.num_loaded
        self.label, self._asks = chosen.label, chosen.rest is Rest.PREFILL
        others = [each for each in decision.candidates if each is not chosen][: MAX_LISTED - 1]
        self._plan = "; ".join(f"{each.label} {each.seconds:.3f}s" for each in (chosen, *others))

    def _allows(self, candidate: Candidate) -> bool:
        """The plan has weighed asking against computing, and says how many tokens are worth a question."""
        if self.target is None:
            return True
        missing = (len(self.order.block_ids) - candidate.num_loaded) * self._block_size
        return (missing >= max(1, self.target.min_tokens)) is (candidate.rest is Rest.PREFILL)

    @property
    def arrived(self) -> int:
        """Leading blocks that are there."""
        arrived = self.num_from_tiers + self.gap.blocks
        return arrived + self.brought.blocks if arrived == self._planned else arrived

    def took(self, source: str, first: int, count: int) -> None:
        """A tier brought `count` blocks from block `first` of the order on."""
        self.num_from_tiers = first + count
        if count:
            self._by_tier[source] = count

    def ask(self) -> Ask | None:
        """What the prefill worker is to bring, whatever the tiers do."""
        return self._ask(self._planned, len(self.order.block_ids)) if self._asks else None

    def ask_for_gap(self) -> Ask | None:
        """What tiers were to bring and did not, once the prefill worker has brought its part."""
        return self._ask(self.num_from_tiers, self._planned) if self._asks else None

    def _ask(self, first: int, until: int) -> Ask | None:
        order, request = self.order, self._request
        if first >= until or request is None or self.target is None:
            return None
        begin = order.first_block
        return Ask(
            order.load_id,
            order.request_id,
            self.target,
            request.tokens_of(order.index)[: (begin + until) * self._block_size],
            request.cache_salt,
            request.epoch,
            begin + first,
            order.block_ids[first:until],
        )

    def report(self, unquiet: tuple[int, ...]) -> LoadReport:
        brought, gap = self.brought, self.gap
        last = [part.last_block_at for part in (brought, gap) if part.last_block_at is not None]
        return LoadReport(
            arrived=self.arrived,
            by_tier=tuple(self._by_tier.items()),
            remote_cached_blocks=brought.cached_blocks + gap.cached_blocks,
            remote_queue_s=brought.queue_s + gap.queue_s,
            nbytes=brought.nbytes + gap.nbytes,
            transfer_s=brought.transfer_s + gap.transfer_s,
            exposed_s=gap.exposed_s or brought.exposed_s,
            last_block_at=max(last, default=None),
            error=self.error,
            plan=self._plan,
            unquiet=unquiet,
        )
