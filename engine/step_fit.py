"""How long a worker's steps take, learnt from those it has run.

Least squares of seconds = a + b x + c y (`core.step_model`), of relative residuals, since a step of one token
is to be predicted as well as one of a thousand. What is known is kept as an information matrix, which forgets
along the step that comes in and along nothing else: a worker that decodes one batch size for an hour still
knows what it knew of others (directional forgetting: Cao and Schwartz, "A directional forgetting algorithm
based on the decomposition of the information matrix", Automatica 36, 2000).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from core.step_model import GUESSED_DECODE, GUESSED_PREFILL, StepModel

FORGET = 0.03
"""Share of what is known along a step that it replaces: a memory of some 30 steps of its kind."""

GUESS_WEIGHT = 0.01
"""Of the first guess, in steps."""

CAP = 3.0
"""A residual counts up to so many times the usual one: a page fault or a paused process says little about
the next step. When all residuals are large the usual one grows, by up to a fifth a step."""

IN_A_ROW = 3
AFTER_CHANGE = 0.7
"""So many steps in a row too far off, to one side, are no outliers: the machine has changed, and with each of
them so much is left of all that was known."""

SPREAD_GAIN = 0.1
FIRST_SPREAD, LEAST_SPREAD = 0.3, 0.02
"""The usual residual, as a share of the prediction."""

TYPICAL_CONTEXT = 1000
"""Tokens; makes x and y numbers of the same size, no more."""

MIN_STEP_S = 1e-6
ROUNDING = 1e-12
"""Of a pivot, as a share of its diagonal: less is what rounding left."""

Vector = tuple[float, float, float]


class StepFit:
    """One kind of step. `x_scale`: a large step's x, which keeps the numbers of the same size."""

    def __init__(self, guess: StepModel, x_scale: float) -> None:
        self._scales = (1.0, x_scale, x_scale * TYPICAL_CONTEXT)
        self._theta: Vector = (guess.a, guess.b * self._scales[1], guess.c * self._scales[2])
        whole = sum(self._theta)
        self._info = [[0.0] * 3 for _ in range(3)]
        for i, value in enumerate(self._theta):
            self._info[i][i] = GUESS_WEIGHT / ((value or whole) * whole)
        self._spread = FIRST_SPREAD
        self._streak = 0
        self._num_steps = 0

    @property
    def model(self) -> StepModel:
        a, b, c = (value / scale for value, scale in zip(self._theta, self._scales, strict=True))
        return StepModel(a, b, c, self._num_steps)

    def add(self, x: float, y: float, seconds: float) -> None:
        """A step of this kind took so long. The first one says how fast the machine is compared with the
        guess, what comes after it tells a, b and c apart."""
        phi = (1.0, x / self._scales[1], y / self._scales[2])
        predicted = max(MIN_STEP_S, _dot(phi, self._theta))
        if not self._num_steps and seconds > 0:
            factor, predicted = seconds / predicted, seconds
            self._theta = (self._theta[0] * factor, self._theta[1] * factor, self._theta[2] * factor)
            self._weigh(factor**-2)
        residual = self._capped(seconds / predicted - 1.0)
        if changed := abs(self._streak) >= IN_A_ROW:
            self._weigh(AFTER_CHANGE)
        self._num_steps += 1
        row = (phi[0] / predicted, phi[1] / predicted, phi[2] / predicted)
        self._learn(row)
        gain = _solve(self._info, row, (0, 1, 2))
        moved = [value + residual * each for value, each in zip(self._theta, gain, strict=True)]
        self._theta = _not_negative(self._info, moved)
        if changed:  # shares of larger predictions, or the steps of a faster past would outweigh these
            self._weigh(min(1.0, predicted / max(MIN_STEP_S, _dot(phi, self._theta))) ** 2)

    def _capped(self, residual: float) -> float:
        """What of it counts; keeps the usual residual and the row of those beyond it."""
        limit = CAP * self._spread
        beyond = (residual > limit) - (residual < -limit)
        self._streak = self._streak + beyond if beyond * self._streak > 0 else beyond
        residual = max(-limit, min(limit, residual))
        if self._num_steps:
            share = max(SPREAD_GAIN, 1 / (self._num_steps + 1))
            self._spread = max(LEAST_SPREAD, self._spread + share * (abs(residual) - self._spread))
        return residual

    def _weigh(self, factor: float) -> None:
        """Let what is known count so much more or less."""
        self._info = [[value * factor for value in row] for row in self._info]

    def _learn(self, row: Vector) -> None:
        """Forget along this step, and know it."""
        info = self._info
        known = [_dot(each, row) for each in info]
        share = FORGET / _dot(known, row)
        for i in range(3):
            for j in range(3):
                info[i][j] += row[i] * row[j] - share * known[i] * known[j]


def _dot(a: Sequence[float], b: Sequence[float]) -> float:
    return a[0] * b[0] + a[1] * b[1] + a[2] * b[2]


def _solve(matrix: Sequence[Sequence[float]], right: Sequence[float], free: Sequence[int]) -> Vector:
    """The unknowns `free` of a positive definite system of at most three; the others are 0. Cholesky."""
    n = len(free)
    root = [[0.0] * n for _ in range(n)]
    half = [0.0] * n
    for i in range(n):
        for j in range(i + 1):
            rest = matrix[free[i]][free[j]] - sum(root[i][k] * root[j][k] for k in range(j))
            least = ROUNDING * matrix[free[i]][free[i]]
            root[i][j] = max(rest, least) ** 0.5 if i == j else rest / root[j][j]
        half[i] = (right[free[i]] - sum(root[i][k] * half[k] for k in range(i))) / root[i][i]
    found = [0.0, 0.0, 0.0]
    for i in reversed(range(n)):
        known = sum(root[k][i] * found[free[k]] for k in range(i + 1, n))
        found[free[i]] = (half[i] - known) / root[i][i]
    return (found[0], found[1], found[2])


def _not_negative(info: Sequence[Sequence[float]], theta: Sequence[float]) -> Vector:
    """The nearest values without a negative one, near as `info` measures it: what one coefficient may not
    say, the others do."""
    free = [0, 1, 2]
    found: Sequence[float] = theta
    while any(found[i] < 0 for i in free):
        free = [i for i in free if found[i] >= 0]
        right = [_dot(row, theta) for row in info]
        found = _solve(info, right, free)
    return (max(found[0], MIN_STEP_S), found[1], found[2])


@dataclass(frozen=True, slots=True)
class StepLoad:
    """What a step computes: `tokens` of prompts and the sum of tokens * context over them, `sequences` that
    decode and the context tokens of all of them. See `core.step_model`."""

    tokens: int = 0
    products: float = 0.0
    sequences: int = 0
    context: int = 0

    @classmethod
    def of(cls, chunks: Iterable[tuple[int, int]]) -> StepLoad:
        """Of chunks given by their first position and their count. Like kernels it takes a single token for
        a decode, also where it is a prompt's last one."""
        tokens, products, sequences, context = 0, 0.0, 0, 0
        for start, count in chunks:
            if count == 1:
                sequences += 1
                context += start + 1
            else:
                tokens += count
                products += count * (start + count / 2)
        return cls(tokens, products, sequences, context)


class StepTimes:
    """The step models of one worker. Not thread-safe: the engine's."""

    def __init__(self, max_num_batched_tokens: int, max_num_seqs: int) -> None:
        self._prefill = StepFit(GUESSED_PREFILL, max_num_batched_tokens)
        self._decode = StepFit(GUESSED_DECODE, max_num_seqs)
        self.prefill, self.decode = self._prefill.model, self._decode.model

    def measured(self, load: StepLoad, seconds: float) -> None:
        """A step took so long. Where it did both kinds of work, it is fitted as prompts beside decodes
        (`StepModel.beside`): what these add to any step is taken off."""
        if seconds <= 0:  # less than the clock can tell
            return
        if not load.tokens:
            self._decode.add(load.sequences, load.context, seconds)
            self.decode = self._decode.model
            return
        decodes_s = self.decode.b * load.sequences + self.decode.c * load.context
        self._prefill.add(load.tokens, load.products, seconds - decodes_s)
        self.prefill = self._prefill.model
