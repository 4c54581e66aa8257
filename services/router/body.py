"""What every object in a request's body has in common."""

from __future__ import annotations

from typing import Any, ClassVar

from pydantic import BaseModel, ConfigDict, model_validator
from pydantic_core import PydanticCustomError

UNKNOWN_NAME = "unknown_name"
"""The kind of a pydantic error whose context has the `name`."""


class Body(BaseModel):
    """No coercion, no unknown names, null = absent."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True, allow_inf_nan=False)
    names: ClassVar[frozenset[str]]

    @classmethod
    def __pydantic_init_subclass__(cls, **kwargs: Any) -> None:
        cls.names = frozenset(field.alias or name for name, field in cls.model_fields.items())

    @model_validator(mode="before")
    @classmethod
    def _named(cls, value: Any) -> Any:
        if not isinstance(value, dict):
            return value
        given = {name: item for name, item in value.items() if item is not None}
        unknown = next((name for name in given if name not in cls.names), None)
        if unknown is not None:
            raise PydanticCustomError(UNKNOWN_NAME, "{name} is no parameter", {"name": unknown})
        return given
