"""What a prompt would cost a worker, in tokens: what it has to compute, and what it is busy with.

    cost = prompt - credit  +  (sequences it has + sequences it was sent lately) * tokens of a sequence

A sequence counts as an eighth of this prompt, so a hit of all of it is worth eight sequences sent lately, or
four that still run and so count twice. The worker that holds it gets the request unless it is further ahead
of another one than that; then the other computes the prefix, and holds it from then on. Prompts that nobody
has, or everybody, go to the least busy.

Sequences sent lately count even when they are over. Where requests come one by one nobody ever has a load,
and the first worker with a shared prefix would get all of them. The count fades with what is sent, not with
time: a slow trickle is spread as well as a burst.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import inf

from planning.sources import FIRST_GUESS_TOKENS_PER_S

SEQUENCE_SHARE = 1 / 8
"""Of a prompt: what one more sequence on a worker counts as."""

MIN_SEQUENCE_TOKENS = 64
"""A sequence generates, however short its prompt: a hit of fewer tokens than this only breaks ties."""

RECENT_PER_WORKER = 16
"""Sequences sent lately that a worker remembers where all get alike. Well above the eight of a hit, so that
a favoured worker stays below twice the others' share."""


def credit_tokens(
    found: Mapping[str, int], block_size: int, tier_token_s: Mapping[str, float], prefill_token_s: float
) -> float:
    """Tokens of a prompt that a worker need not compute, each less the share that loading it takes.

    `found`: leading blocks by the tier they are in. `tier_token_s`: seconds to load a token; nothing on the
    device, and a tier whose speed is not known brings no credit. `prefill_token_s`: seconds to compute one,
    0 = not measured yet.
    """
    compute_s = prefill_token_s or 1 / FIRST_GUESS_TOKENS_PER_S
    load_s = {**tier_token_s, "device": 0.0}
    return sum(
        count * block_size * max(0.0, 1.0 - load_s.get(tier, inf) / compute_s)
        for tier, count in found.items()
    )


def cost_tokens(num_prompt_tokens: int, credit: float, busy_sequences: float) -> float:
    """What serving the prompt costs a worker that has, and lately was sent, so many sequences."""
    sequence_tokens = max(MIN_SEQUENCE_TOKENS, num_prompt_tokens * SEQUENCE_SHARE)
    return num_prompt_tokens - credit + busy_sequences * sequence_tokens


def fade(num_workers: int) -> float:
    """What is left of each worker's count of sequences sent lately, for each one sent to the pool."""
    return 1 - 1 / (RECENT_PER_WORKER * num_workers)
