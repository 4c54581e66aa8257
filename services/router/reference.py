"""What all workers of a fleet have in common: the fingerprint of most decode workers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from core.kv import Fingerprint


class Reference:
    """`fingerprint`: what most connected decode workers have (of equals, the one discovered first).
    `tokenizer_digest`: the router's own; who has another one has no vote."""

    def __init__(self, tokenizer_digest: str) -> None:
        self.fingerprint: Fingerprint | None = None
        self._tokenizer_digest = tokenizer_digest
        self._votes: Counter[Fingerprint] = Counter()

    def may_vote(self, fingerprint: Fingerprint) -> bool:
        return fingerprint.tokenizer_digest == self._tokenizer_digest

    def count(
        self, before: Fingerprint | None, vote: Fingerprint | None, votes: Iterable[Fingerprint | None]
    ) -> bool:
        """Take over a changed vote. `votes`: all, as discovered. Returns whether the reference is another."""
        if before is not None:
            self._votes[before] -= 1
        if vote is not None:
            self._votes[vote] += 1
        self._votes = +self._votes
        most = max(self._votes.values(), default=0)
        best = [each for each, count in self._votes.items() if count == most]
        if len(best) > 1:
            best = [each for each in votes if each in best]
        reference = best[0] if best else None
        changed, self.fingerprint = reference != self.fingerprint, reference
        return changed

    def mismatch(self, ours: Fingerprint | None) -> str:
        """Why a worker with this fingerprint does not fit the fleet; "" where it does, or has none."""
        if ours is None:
            return ""
        if not self.may_vote(ours):
            return "tokenizer_digest differs from the router's; start both with the same model"
        if ours is self.fingerprint or self.fingerprint is None:
            return ""
        difference = self.fingerprint.difference(ours)
        if difference is None:
            return ""
        name, theirs, its = difference
        return f"{name} is {its!r}, the decode workers have {theirs!r}; start all with the same {name}"
