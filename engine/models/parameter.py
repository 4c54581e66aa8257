"""How a model's tensors are made from a checkpoint's."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Parameter:
    """One tensor of a model: the checkpoint tensors `sources`, stacked along dim 0 in this order.

    `source_shapes` are those the checkpoint must have; they agree in all but dim 0.
    """

    name: str
    sources: tuple[str, ...]
    source_shapes: tuple[tuple[int, ...], ...]

    @property
    def shape(self) -> tuple[int, ...]:
        return (sum(shape[0] for shape in self.source_shapes), *self.source_shapes[0][1:])

    @classmethod
    def single(cls, name: str, source: str, *shape: int) -> Parameter:
        """A tensor that is stored as the checkpoint has it."""
        return cls(name, (source,), (shape,))
