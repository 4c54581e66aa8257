"""What a client wants of its answer's speed: two headers over the server's own settings."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from core.errors import InvalidParameter
from core.settings import Settings
from planning.estimate import Targets

TTFT_HEADER = "X-Baton-TTFT-SLO-MS"
ITL_HEADER = "X-Baton-ITL-SLO-MS"

_MS = re.compile(r"\d{1,9}(\.\d{1,6})?", re.ASCII)


def targets_of(scope: Mapping[str, Any], settings: Settings) -> Targets:
    """Of one request (`scope`: ASGI). A header counts before `--ttft-slo-ms` and `--itl-slo-ms`; 0 asks for
    none.

    Raises InvalidParameter, naming the header.
    """
    headers = dict(scope["headers"])
    return Targets(
        _ms(headers, TTFT_HEADER, settings.ttft_slo_ms) / 1000,
        _ms(headers, ITL_HEADER, settings.itl_slo_ms) / 1000,
    )


def _ms(headers: Mapping[bytes, bytes], name: str, default: float) -> float:
    given = headers.get(name.lower().encode())
    if given is None:
        return default
    text = given.decode("latin-1").strip()
    if not _MS.fullmatch(text):
        raise InvalidParameter(
            f"the header {name} should be milliseconds such as 250 or 37.5, or 0 for none", param=name
        )
    return float(text)
