"""How a model's tensors are made from a checkpoint's."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Split(StrEnum):
    """How tensor-parallel ranks divide a tensor among them (Shoeybi et al. 2019)."""

    NONE = "none"
    """every rank has all of it"""
    ROWS = "rows"
    """each rank has its share of the rows of every source: what comes out is divided"""
    COLUMNS = "columns"
    """each rank has its share of the columns: what goes in is divided, what comes out is to be summed"""


@dataclass(frozen=True, slots=True)
class Parameter:
    """One tensor of a model: the checkpoint tensors `sources`, stacked along dim 0 in this order.

    `source_rows` are their sizes in dim 0, which add up to `shape[0]`.
    """

    name: str
    shape: tuple[int, ...]
    sources: tuple[str, ...]
    source_rows: tuple[int, ...]
    split: Split = Split.NONE

    @classmethod
    def single(cls, name: str, source: str, *shape: int, split: Split = Split.NONE) -> Parameter:
        """A tensor that is stored as the checkpoint has it."""
        return cls(name, shape, (source,), shape[:1], split)
