"""One prompt of a client's request with its choices: where it runs, and what has come of it."""

from __future__ import annotations

from dataclasses import dataclass, field

from core.request import Gathered, TokenLogprob
from planning.plan import Plan
from planning.recovery import Tries
from services.router.choice import Choice
from services.router.placed import Placed
from services.router.session import Session
from services.router.text import Prompt


@dataclass(slots=True)
class Part:
    """A prompt on one decode worker at a time. `name`: its id without the number of the try. `num_before`:
    tokens that its choices had when the present try began."""

    prompt: Prompt
    block_hashes: tuple[bytes, ...]
    plan: Plan
    choices: list[Choice]
    name: str
    session: Session | None = None
    placed: Placed | None = None
    tries: Tries = field(default_factory=Tries)
    num_before: int = 0
    gathered: Gathered | None = None
    logprobs: tuple[TokenLogprob | None, ...] = ()

    @property
    def epoch(self) -> int:
        """The number of the present try."""
        return self.tries.resumes

    @property
    def request_id(self) -> str:
        """Of the present try at its worker. Each has its own: nothing of an older one is taken for it."""
        return f"{self.name}.{self.epoch}" if self.epoch else self.name

    @property
    def finished(self) -> bool:
        return all(choice.finished for choice in self.choices)

    @property
    def open_choices(self) -> int:
        return sum(not choice.finished for choice in self.choices)

    @property
    def num_tokens(self) -> int:
        """Tokens of all choices."""
        return sum(choice.num_tokens for choice in self.choices)

    @property
    def longest(self) -> int:
        """Tokens of the longest choice that goes on."""
        return max((choice.num_tokens for choice in self.choices if not choice.finished), default=0)

    @property
    def resumed(self) -> tuple[tuple[int, tuple[int, ...]], ...]:
        """`Request.resumed` of a try that begins now."""
        if not self.num_tokens:
            return ()
        open_choices = [(i, choice) for i, choice in enumerate(self.choices) if not choice.finished]
        return tuple((i, tuple(choice.token_ids)) for i, choice in open_choices)
