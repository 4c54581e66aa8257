"""Which heads go where when two workers split a model over different numbers of tensor-parallel ranks.

A worker of degree t keeps t regions. Block b of rank r holds KV heads `heads_of(num_kv_heads, t, r)` of
logical block b, layer after layer: `num_layers` rows of `num_kv_heads / t` heads, which are alike in all
rows of one band (`core.kv.Band`). So a range of heads is a range of columns, the same in every row of
a band. With 6 heads, from degree 2 to degree 3:

    a row of rank   0          1               a row of rank   0      1      2
    theirs          0 1 2      3 4 5           ours            0 1    2 3    4 5

    slices          0 1 -> rank 0    2 -> rank 1, first    3 -> rank 1, second    4 5 -> rank 2

Pure arithmetic; nothing here touches memory.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from core.errors import ConfigError, IncompatiblePeer
from core.kv import KVLayout


@dataclass(frozen=True, slots=True)
class HeadSlice:
    """Heads that one rank of the source and one of the destination have in common.

    `src_head`, `dst_head`: the first of them, counted within that rank's own block.
    """

    src_rank: int
    src_head: int
    dst_rank: int
    dst_head: int
    num_heads: int


def rank_layout(layout: KVLayout, degree: int) -> KVLayout:
    """The pool of each of `degree` ranks. Raises ConfigError unless the KV heads divide evenly."""
    if degree < 1 or layout.num_kv_heads % degree:
        fits = [t for t in range(1, layout.num_kv_heads + 1) if layout.num_kv_heads % t == 0]
        raise ConfigError(
            f"{layout.num_kv_heads} KV heads cannot be split over {degree} tensor-parallel ranks; "
            f"choose one of {', '.join(map(str, fits))}"
        )
    return replace(layout, num_kv_heads=layout.num_kv_heads // degree)


def heads_of(num_kv_heads: int, degree: int, rank: int) -> range:
    """The model's KV heads in the blocks of one rank."""
    each = num_kv_heads // degree
    return range(rank * each, (rank + 1) * each)


def plan_slices(num_kv_heads: int, src_degree: int, dst_degree: int) -> tuple[HeadSlice, ...]:
    """Every head once, ordered by source rank, then destination rank.

    Raises IncompatiblePeer when the source's degree does not divide the heads; ours is known to.
    """
    if src_degree < 1 or num_kv_heads % src_degree:
        raise IncompatiblePeer("tensor_parallel_size", dst_degree, src_degree)
    slices = []
    for src_rank in range(src_degree):
        theirs = heads_of(num_kv_heads, src_degree, src_rank)
        for dst_rank in range(dst_degree):
            ours = heads_of(num_kv_heads, dst_degree, dst_rank)
            first, end = max(theirs.start, ours.start), min(theirs.stop, ours.stop)
            if first < end:
                slices.append(
                    HeadSlice(src_rank, first - theirs.start, dst_rank, first - ours.start, end - first)
                )
    return tuple(slices)
