"""How a model's tensors are made from a checkpoint's."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Parameter:
    """One tensor of a model: the checkpoint tensors `sources`, stacked along dim 0 in this order.

    `source_rows` are their sizes in dim 0, which add up to `shape[0]`.
    """

    name: str
    shape: tuple[int, ...]
    sources: tuple[str, ...]
    source_rows: tuple[int, ...]

    @classmethod
    def single(cls, name: str, source: str, *shape: int) -> Parameter:
        """A tensor that is stored as the checkpoint has it."""
        return cls(name, shape, (source,), shape[:1])
