"""How long a step takes, as a line that a worker fits to the steps it has run."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class StepModel:
    """Seconds of a step = a + b x + c y, each of them >= 0. `num_steps`: measured, 0 = a guess.

    Prefill: x = new tokens, y = sum over the prompts of new tokens * context (tokens before them and half of
    the new ones). Decode: x = sequences, y = context tokens of all of them.
    """

    a: float
    b: float
    c: float = 0.0
    num_steps: int = 0

    def seconds(self, x: float, y: float = 0.0) -> float:
        return self.a + self.b * x + self.c * y


GUESSED_PREFILL = StepModel(a=0.005, b=0.001)
GUESSED_DECODE = StepModel(a=0.02, b=0.002)
"""Of a worker that has run nothing yet: the embedded model on a core or two, to within a few times."""
