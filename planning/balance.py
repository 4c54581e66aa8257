"""What keeps a shared prefix from drawing everything to the worker that holds it.

    cost of a worker = its estimated seconds
                       + sequences it was sent lately, beyond the least of all * an eighth of the seconds
                         of computing all of this prompt

So a hit of all of the prompt is worth eight sequences. The worker that holds it gets the request unless it
was sent that many more than another one; then the other computes the prefix, and holds it from then on.
Prompts that nobody has, or everybody, go to the one that was sent the least.

Sequences sent lately count even when they are over: where requests come one by one nobody ever has a queue,
and the first worker with a shared prefix would get all of them. The count fades with what is sent, not with
time: a slow trickle is spread as well as a burst.
"""

from __future__ import annotations

from core.step_model import StepModel

SEQUENCE_SHARE = 1 / 8
"""Of computing the prompt: what one more sequence sent lately counts as."""

MIN_SEQUENCE_TOKENS = 64
"""A sequence generates, however short its prompt: a hit of fewer tokens than this only breaks ties."""

RECENT_PER_WORKER = 16
"""Sequences sent lately that a worker remembers where all get alike. Well above the eight of a hit, so that
a favoured worker stays below twice the others' share."""


def sequence_s(model: StepModel, whole_prompt_s: float) -> float:
    """Seconds that a sequence sent lately counts as, where computing all of the prompt takes so long."""
    return max(MIN_SEQUENCE_TOKENS * model.b, whole_prompt_s * SEQUENCE_SHARE)


def fade(num_workers: int) -> float:
    """What is left of each worker's count of sequences sent lately, for each one sent to the pool."""
    return 1 - 1 / (RECENT_PER_WORKER * num_workers)
