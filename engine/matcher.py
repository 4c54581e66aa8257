"""What the sampler and the engine need of a grammar; `engine.grammar` has the real one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch


class Matcher(Protocol):
    """Where one choice stands in its grammar: a function of the grammar and the choice's output tokens.

    A broken matcher (`error`) stays broken: its request has to be ended.
    """

    @property
    def num_seen(self) -> int:
        """Output tokens that it has been told of."""
        ...

    @property
    def finished(self) -> bool:
        """The output is complete: nothing but an end token may follow."""
        ...

    @property
    def error(self) -> str:
        """Why it can go no further, or ""."""
        ...

    def advance(self, token_ids: Sequence[int]) -> None:
        """Take the next output tokens."""
        ...

    def allowed(self) -> torch.Tensor:
        """bool `[vocab]`: tokens that may come next, at least one; end tokens only where the output is
        complete, or where the matcher is broken."""
        ...

    def fork(self) -> Matcher:
        """An independent one in the same state."""
        ...
