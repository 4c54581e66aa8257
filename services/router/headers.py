"""Headers of a request."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def header(scope: Mapping[str, Any], name: str) -> str | None:
    """The value of a request's header (`scope`: ASGI) without the spaces around it, None without any; of
    several of that name the first one's."""
    wanted = name.lower().encode()
    value = next((value for known, value in scope["headers"] if known == wanted), None)
    return None if value is None else value.strip().decode("latin-1")
