"""From logits to tokens: penalties, temperature, top-k, top-p, min-p, log probabilities.

The draw for a position is a function of (seed, position) alone, so that a request that was preempted
or moved to another worker draws the same tokens again. All probabilities are computed in fp32 and
summed in fp64. Order: bias and penalties, masks (`engine.masks`), temperature, top-k, top-p, min-p.
Log probabilities are those of the raw distribution.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass

import numpy as np
import torch

from core.request import SamplingParams, TokenLogprob
from engine import masks
from engine.sequence import Sequence

_HEAD = 1024
"""Top-p looks at this many best tokens first; sorting the whole vocabulary is seldom needed."""


@dataclass(frozen=True, slots=True)
class Draw:
    """One token to choose: from logits row `row`, for choice `index` of `seq`."""

    row: int
    seq: Sequence
    index: int


@dataclass(slots=True)
class _TokenCounts:
    """What penalties look at, kept up to date with the sequence's tokens."""

    seen: torch.Tensor  # bool [vocab]: prompt or output
    output: torch.Tensor  # fp32 [vocab]: occurrences in the output
    num_counted: int


def sample(logits: torch.Tensor, draws: Seq[Draw]) -> list[tuple[int, TokenLogprob | None]]:
    """Choose a token per draw from fp32 `logits` `[rows, vocab]`; logits are not changed."""
    chosen: list[int] = [-1] * len(draws)
    plain = [i for i, draw in enumerate(draws) if _is_plain(draw)]
    if plain:
        best = logits[[draws[i].row for i in plain]].argmax(dim=-1).tolist()
        for i, token_id in zip(plain, best, strict=True):
            chosen[i] = token_id
    rest = [i for i in range(len(draws)) if chosen[i] < 0]
    if rest and logits.is_cuda:
        for i, token_id in zip(rest, choose_together(logits, [draws[i] for i in rest]), strict=True):
            chosen[i] = token_id
    else:
        for i in rest:
            chosen[i] = _choose(logits[draws[i].row], draws[i])
    logprobs: list[TokenLogprob | None] = [None] * len(draws)
    counts = {i: d.seq.sampling.logprobs for i, d in enumerate(draws) if d.seq.sampling.logprobs is not None}
    if counts:
        rows = logits[[draws[i].row for i in counts]]
        found = logprobs_of(rows, [chosen[i] for i in counts], list(counts.values()))
        for i, logprob in zip(counts, found, strict=True):
            logprobs[i] = logprob
    return list(zip(chosen, logprobs, strict=True))


def logprobs_of(logits: torch.Tensor, token_ids: Seq[int], counts: Seq[int]) -> list[TokenLogprob]:
    """Raw log probabilities of `token_ids` `[n]`, each under its row of `logits` `[n, vocab]`, and of the
    `counts` `[n]` best tokens of that row. Waits for the device once, and once per different count.
    """
    logprobs = torch.log_softmax(logits, dim=-1)
    at = torch.tensor(token_ids, dtype=torch.int64).to(logits.device)
    given = logprobs.gather(1, at[:, None])[:, 0].tolist()
    tops: list[tuple[tuple[int, float], ...]] = [()] * len(given)
    # Which of equal tokens come first may depend on how many are asked for: no row's answer on another's.
    for count in set(counts) - {0}:
        rows = [i for i, each in enumerate(counts) if each == count]
        best, ids = torch.topk(logprobs if len(rows) == len(given) else logprobs[rows], count)
        for i, of_row, values in zip(rows, ids.tolist(), best.tolist(), strict=True):
            tops[i] = tuple(zip(of_row, values, strict=True))
    return [TokenLogprob(*each) for each in zip(token_ids, given, tops, strict=True)]


def uniform(seed: int, position: int) -> float:
    """A number in [0, 1) that depends on nothing but (seed, position): Philox 4x64, counter-based."""
    bits = np.random.Philox(key=seed % 2**64, counter=[position, 0, 0, 0])
    return float(np.random.Generator(bits).random())


def _is_plain(draw: Draw) -> bool:
    params = draw.seq.sampling
    changed = params.has_penalties or params.logit_bias or masks.any_apply(draw.seq)
    return params.greedy and not changed


def choose_together(logits: torch.Tensor, draws: Seq[Draw]) -> list[int]:
    """A token per draw with one kernel over all of them, where logits are on a device.

    Rows are read in the order of token ids, not of probability, so a draw is another one than on a CPU.
    """
    from engine.kernels.triton.sample import sample as sample_rows  # triton is there only beside CUDA

    rows = logits[[draw.row for draw in draws]]
    for row, draw in zip(rows, draws, strict=True):
        _adjust(row, draw)
    _mask(rows, draws)
    params = torch.tensor([_sample_params(draw) for draw in draws], dtype=torch.float32)
    return sample_rows(rows, params.to(logits.device)).tolist()


def warm_up(vocab_size: int, device: torch.device) -> None:
    """Compile the kernel of `choose_together`, so that the first draw does not wait for it."""
    from engine.kernels.triton.sample import sample as sample_rows

    params = torch.tensor([[1.0, 1.0, 0.5, 0.0, 0.5]], device=device)
    sample_rows(torch.zeros(1, vocab_size, device=device), params)


def _sample_params(draw: Draw) -> tuple[float, float, float, float, float]:
    """A row of what `engine.kernels.reference.sample` takes."""
    params = draw.seq.sampling
    if params.greedy:
        return 0.0, 0.0, 1.0, 0.0, 0.0
    return params.temperature, max(0, params.top_k), params.top_p, params.min_p, _uniform_of(draw)


def _choose(logits: torch.Tensor, draw: Draw) -> int:
    params = draw.seq.sampling
    logits = logits.clone()
    _adjust(logits, draw)
    _mask(logits[None], [draw])
    if params.greedy:
        return int(logits.argmax())
    return _draw(logits / params.temperature, params, _uniform_of(draw))


def _uniform_of(draw: Draw) -> float:
    return uniform(draw.seq.sampling.seed + draw.index, len(draw.seq.tokens))


def _adjust(logits: torch.Tensor, draw: Draw) -> None:
    """Bias and penalties of one row, in place."""
    params, seq = draw.seq.sampling, draw.seq
    for token_id, bias in params.logit_bias:
        logits[token_id] += bias
    if params.has_penalties:
        _penalize(logits, seq, params)


def _mask(rows: torch.Tensor, draws: Seq[Draw]) -> None:
    """`engine.masks` of all draws, in place, over one copy to the device. Row i is that of draw i."""
    masked = [i for i, draw in enumerate(draws) if masks.any_apply(draw.seq)]
    if masked:
        allowed = torch.stack([masks.allowed(draws[i].seq, rows.shape[1]) for i in masked])
        rows[masked] = rows[masked].masked_fill_(~allowed.to(rows.device), -torch.inf)


def _penalize(logits: torch.Tensor, seq: Sequence, params: SamplingParams) -> None:
    """Repetition counts prompt and output, once a token; presence and frequency the output only."""
    counts = seq.penalties
    if not isinstance(counts, _TokenCounts):
        seen = torch.zeros_like(logits, dtype=torch.bool)
        seen[torch.tensor(seq.tokens[: seq.num_prompt])] = True
        counts = _TokenCounts(seen, torch.zeros_like(logits), seq.num_prompt)
        seq.penalties = counts
    for token_id in seq.tokens[counts.num_counted :]:
        counts.seen[token_id] = True
        counts.output[token_id] += 1
    counts.num_counted = len(seq.tokens)
    if params.repetition_penalty != 1.0:
        penalty = params.repetition_penalty
        penalized = torch.where(logits > 0, logits / penalty, logits * penalty)
        logits.copy_(
            torch.where(counts.seen, penalized, logits)
        )  # an index of `seen` would wait for a device
    logits -= params.frequency_penalty * counts.output
    logits -= params.presence_penalty * (counts.output > 0)


def _draw(scaled: torch.Tensor, params: SamplingParams, u: float) -> int:
    """Inverse transform sampling over what the filters leave."""
    if params.top_k <= 0 and params.top_p >= 1.0 and params.min_p <= 0.0:
        cumulative = torch.softmax(scaled, dim=-1).double().cumsum(0)
        return min(int(torch.searchsorted(cumulative, u * cumulative[-1], right=True)), len(scaled) - 1)
    probs = torch.softmax(scaled, dim=-1)
    best, ids = _filtered(probs, params)
    cumulative = best.double().cumsum(0)
    at = min(int(torch.searchsorted(cumulative, u * cumulative[-1], right=True)), len(best) - 1)
    return int(ids[at])


def _filtered(probs: torch.Tensor, params: SamplingParams) -> tuple[torch.Tensor, torch.Tensor]:
    """The kept probabilities, largest first, and their token ids."""
    vocab = len(probs)
    width = min(params.top_k, vocab) if params.top_k > 0 else min(_HEAD, vocab)
    best, ids = torch.topk(probs, width)
    if params.top_k <= 0 and width < vocab and not _head_suffices(best, params):
        best, ids = torch.sort(probs, descending=True, stable=True)
    # top-p is a share of what top-k left (renormalized), as in the usual chain of filters.
    total = best.double().sum() if params.top_k > 0 else 1.0
    before = best.double().cumsum(0) - best
    keep = (before < params.top_p * total) & (best >= params.min_p * best[0])
    keep[0] = True
    return best[keep], ids[keep]


def _head_suffices(best: torch.Tensor, params: SamplingParams) -> bool:
    by_top_p = params.top_p < 1.0 and float(best.double().sum()) >= params.top_p
    by_min_p = params.min_p > 0.0 and float(best[-1]) < params.min_p * float(best[0])
    return by_top_p or by_min_p
