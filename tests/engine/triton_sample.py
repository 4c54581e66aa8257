"""Random rows for the Triton sampler and what it may choose; see `triton_cases`."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product

import torch
from hypothesis import strategies as st
from triton_cases import DEVICE, poisoned, seeds

from engine.kernels import reference
from engine.kernels.triton.sample import sample

ROUNDING = 1e-5
"""fp32 sums in another order move the edges of filters and draws by no more than this share."""


@dataclass(frozen=True)
class SampleCase:
    """`rows`: temperature, top-k, top-p, min-p, uniform of each."""

    vocab: int
    rows: tuple[tuple[float, ...], ...]
    spread: float
    masked: bool
    seed: int


def _share(least: int, most: int) -> st.SearchStrategy[float]:
    return st.integers(least, most).map(lambda thousandths: thousandths / 1000)


def _row(top_ks: st.SearchStrategy[int]) -> st.SearchStrategy[tuple[float, ...]]:
    return st.tuples(
        st.sampled_from([0.0, 1e-5, 0.3, 0.7, 1.0, 1.6]),
        top_ks,
        st.just(1.0) | _share(10, 990),
        st.just(0.0) | _share(1, 900),
        _share(0, 1000),
    )


sample_cases = st.builds(
    SampleCase,
    vocab=st.sampled_from([1, 7, 100, 1024, 1500]),
    rows=st.lists(_row(st.just(0) | st.integers(1, 60)), min_size=1, max_size=2).map(tuple),
    spread=st.sampled_from([0.1, 1.0, 4.0]),
    masked=st.booleans(),
    seed=seeds,
)


def check_sample(case: SampleCase) -> None:
    """What the twin chooses, or would with the draw or top-p moved by a rounding error."""
    generator = torch.Generator().manual_seed(case.seed)
    logits = torch.randn(len(case.rows), case.vocab, generator=generator) * case.spread
    if case.masked:
        hidden = torch.rand(case.vocab, generator=generator) < 0.5
        hidden[int(case.seed % case.vocab)] = False
        logits[:, hidden] = -torch.inf
    params = torch.tensor(case.rows, dtype=torch.float32)
    with poisoned():
        got = sample(logits.to(DEVICE), params.to(DEVICE)).tolist()
    for row, (token, given) in enumerate(zip(got, params, strict=True)):
        near = [given]
        for draw, share in product((-ROUNDING, 0.0, ROUNDING), repeat=2):
            moved = given.clone()
            moved[4] = (moved[4] + draw).clamp(0.0, 1.0)
            moved[2] = moved[2] if given[2] == 1.0 else moved[2] + share
            near.append(moved)
        allowed = reference.sample(logits[row].expand(len(near), -1), torch.stack(near)).tolist()
        assert token in allowed, f"row {row}: chose {token}, not {sorted(set(allowed))}"
