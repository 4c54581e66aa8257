"""What a scheduler is allowed to do, and what it decided for one step."""

from __future__ import annotations

from dataclasses import dataclass, field

from engine.messages import Event
from engine.sequence import Sequence

MAX_PROMPT_LOGPROBS = 256
"""Rows of logits that a step computes for the log probabilities of prompts. 256 rows of 128k tokens take
131 MB in fp32, a whole chunk of 2048 would take 1 GB."""


@dataclass(frozen=True, slots=True)
class Chunk:
    """`count` tokens of one sequence from position `start`; `sample`: its last token's logits are wanted."""

    seq: Sequence
    start: int
    count: int
    sample: bool


@dataclass(slots=True)
class StepPlan:
    """What to do now: first the copies, then one forward pass over the chunks."""

    chunks: list[Chunk] = field(default_factory=list)
    copies: list[tuple[int, int]] = field(default_factory=list)
    events: list[Event] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Limits:
    """What one worker may take on, in tokens, sequences and requests.

    `sliding_window`: see `checkpoint.config.ModelConfig`.
    """

    block_size: int
    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    max_waiting: int
    sliding_window: int = 0
