"""How long a step takes, as a line that a worker fits to the steps it has run."""

from __future__ import annotations

from dataclasses import dataclass, replace


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

    def prompt_seconds(self, num_tokens: int, num_before: int, per_step: int) -> float:
        """Of a prefill model: computing `num_tokens` of a prompt behind `num_before` others, alone, in steps
        of at most `per_step`."""
        context = num_before + num_tokens / 2
        return -(-num_tokens // per_step) * self.a + self.b * num_tokens + self.c * num_tokens * context

    def beside(self, decode: StepModel, sequences: float, context: float) -> StepModel:
        """Of a prefill model: of steps in which so many sequences decode too.

        They add what they add to any step; what a step costs at all counts once, with the prompts.
        """
        return replace(self, a=self.a + decode.b * sequences + decode.c * context)


GUESSED_PREFILL = StepModel(a=0.005, b=0.001)
GUESSED_DECODE = StepModel(a=0.02, b=0.002)
"""Of a worker that has run nothing yet: the embedded model on a core or two, to within a few times."""
