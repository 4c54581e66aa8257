"""A grammar of one rule over small vocabularies: the output ascends by 1 or 2 and ends at `last`."""

from __future__ import annotations

from collections.abc import Sequence

import torch


class Ascending:
    """An `engine.matcher.Matcher`. From `breaks_at` tokens on it is broken."""

    def __init__(self, vocab_size: int, first: int, last: int, breaks_at: int = 10**6) -> None:
        self._vocab_size, self._at, self._last, self._breaks_at = vocab_size, first - 1, last, breaks_at
        self.num_seen = 0
        self.error = ""

    @property
    def finished(self) -> bool:
        return self._at >= self._last

    def advance(self, token_ids: Sequence[int]) -> None:
        for token_id in token_ids:
            if not self.allowed()[token_id]:
                self.error = f"token {token_id} does not follow {self._at}"
            self._at = token_id
            self.num_seen += 1
        if self.num_seen >= self._breaks_at:
            self.error = "too many items"

    def allowed(self) -> torch.Tensor:
        mask = torch.zeros(self._vocab_size, dtype=torch.bool)
        mask[self._at + 1 : min(self._at + 3, self._last + 1)] = True
        return mask

    def fork(self) -> Ascending:
        twin = Ascending(self._vocab_size, 0, self._last, self._breaks_at)
        twin._at, twin.num_seen, twin.error = self._at, self.num_seen, self.error
        return twin
