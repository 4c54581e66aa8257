"""Where a prompt's blocks come from: load from the tiers, ask a prefill worker, or compute here.

    block 0            a                                   n          end of the prompt
    |=== load from tiers ===|=== ask the worker, or compute ===|-- always computed here --|

`decide` prices every combination by measured rates and takes the cheapest. Costs are lines in the number of
blocks, so only the ends of the tiers' segments need to be tried as `a`. Loading, asking and computing follow
one another: a block needs all those before it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

CAUTION = 0.1
"""What others do for us counts as so much slower than estimated: a load can fail, and a tie is not worth
somebody else's time."""


class Rest(StrEnum):
    """Who makes the blocks that no tier brings."""

    LOCAL = "local"
    PREFILL = "prefill"


@dataclass(frozen=True, slots=True)
class TierPrice:
    """A tier that holds the next `count` >= 1 blocks after those of the tiers before it.

    `latency_s` counts once, whatever stands before us in its queue included.
    """

    source: str
    count: int
    latency_s: float
    block_s: float

    def seconds(self, count: int) -> float:
        return self.latency_s + count * self.block_s


@dataclass(frozen=True, slots=True)
class LocalPrice:
    """Computing here. `harm`: what a second of it costs those who decode here meanwhile or will, in seconds
    of this prompt's wait; above 0, an equally fast prefill worker is the better one to compute.
    """

    tokens_per_s: float
    harm: float = 0.0


@dataclass(frozen=True, slots=True)
class PrefillPrice:
    """Asking a prefill worker. `cached_blocks`: leading blocks that it need not compute.

    Its blocks are pulled while it computes the next ones, so the slower of computing and pulling counts,
    and one block's pull after the last one. `queue_s` includes the call itself.
    """

    tokens_per_s: float
    link_nbytes_per_s: float
    queue_s: float = 0.0
    cached_blocks: int = 0


@dataclass(frozen=True, slots=True)
class Prompt:
    """`num_blocks` full blocks may come from elsewhere, the other tokens of `num_tokens` never do.

    `first_block`: those before it are in the own pool already, and cost nothing.
    """

    num_tokens: int
    num_blocks: int
    block_size: int
    block_nbytes: int
    first_block: int = 0


@dataclass(frozen=True, slots=True)
class Candidate:
    """`loads`: (source, blocks) in order, `rest`: who makes the other blocks.

    `seconds`: estimate until the prompt is computed. `cost_s`: the same with caution and harm; the
    smallest one is chosen.
    """

    loads: tuple[tuple[str, int], ...]
    rest: Rest
    seconds: float
    cost_s: float

    @property
    def num_loaded(self) -> int:
        return sum(count for _, count in self.loads)

    @property
    def label(self) -> str:
        """`host+disk+local`: bounded values, for a metric and the request record."""
        return "+".join([*(source for source, _ in self.loads), self.rest])


@dataclass(frozen=True, slots=True)
class Decision:
    """What to do, and every candidate with its estimate, cheapest first."""

    chosen: Candidate
    candidates: tuple[Candidate, ...]


def decide(
    prompt: Prompt,
    tiers: Sequence[TierPrice],
    local: LocalPrice,
    prefill: PrefillPrice | None = None,
) -> Decision:
    """The cheapest way to this prompt. `tiers`: in order of their segments, the first one begins at
    `prompt.first_block`.
    """
    loads = _prefixes(prompt, tiers)
    candidates = [_computed_here(prompt, load, tiers, local) for load in loads]
    if prefill is not None:
        missing = [load for load in loads if _end(prompt, load) < prompt.num_blocks]
        candidates += [_asked(prompt, load, tiers, local, prefill) for load in missing]
    candidates.sort(key=lambda candidate: candidate.cost_s)  # stable: local and shorter loads first
    return Decision(candidates[0], tuple(candidates))


Loads = tuple[tuple[str, int], ...]


def _prefixes(prompt: Prompt, tiers: Sequence[TierPrice]) -> list[Loads]:
    """Nothing, the first tier's blocks, those of the first two, ...; cut at the prompt's last full block."""
    prefixes: list[Loads] = [()]
    for tier in tiers:
        count = min(tier.count, prompt.num_blocks - _end(prompt, prefixes[-1]))
        if count <= 0:
            break
        prefixes.append((*prefixes[-1], (tier.source, count)))
    return prefixes


def _end(prompt: Prompt, loads: Loads) -> int:
    """The first block that is still missing after these loads."""
    return prompt.first_block + sum(count for _, count in loads)


def _loading(loads: Loads, tiers: Sequence[TierPrice]) -> float:
    return sum(tier.seconds(count) for tier, (_, count) in zip(tiers, loads, strict=False))


def _computed_here(prompt: Prompt, loads: Loads, tiers: Sequence[TierPrice], local: LocalPrice) -> Candidate:
    computing_s = (prompt.num_tokens - _end(prompt, loads) * prompt.block_size) / local.tokens_per_s
    return _candidate(loads, Rest.LOCAL, _loading(loads, tiers), computing_s, local)


def _asked(
    prompt: Prompt, loads: Loads, tiers: Sequence[TierPrice], local: LocalPrice, prefill: PrefillPrice
) -> Candidate:
    remote_tokens = max(0, prompt.num_blocks - prefill.cached_blocks) * prompt.block_size
    block_pull_s = prompt.block_nbytes / prefill.link_nbytes_per_s
    pulling_s = (prompt.num_blocks - _end(prompt, loads)) * block_pull_s
    remote_s = prefill.queue_s + max(remote_tokens / prefill.tokens_per_s, pulling_s) + block_pull_s
    computing_s = (prompt.num_tokens - prompt.num_blocks * prompt.block_size) / local.tokens_per_s
    return _candidate(loads, Rest.PREFILL, _loading(loads, tiers) + remote_s, computing_s, local)


def _candidate(
    loads: Loads, rest: Rest, elsewhere_s: float, computing_s: float, local: LocalPrice
) -> Candidate:
    seconds = elsewhere_s + computing_s
    return Candidate(loads, rest, seconds, seconds + CAUTION * elsewhere_s + local.harm * computing_s)
