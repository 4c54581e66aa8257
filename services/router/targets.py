"""What a client wants of its answer's speed: two headers over the server's own settings."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from core.errors import InvalidParameter
from core.settings import Settings
from planning.estimate import Targets
from services.router.headers import header

TTFT_HEADER = "X-Baton-TTFT-SLO-MS"
ITL_HEADER = "X-Baton-ITL-SLO-MS"

AT_ONCE_S = 0.001
"""What is left of a target that is missed already: 0 would mean that there is none."""

_MS = re.compile(r"\d{1,9}(\.\d{1,6})?", re.ASCII)


def targets_of(scope: Mapping[str, Any], settings: Settings) -> Targets:
    """Of one request (`scope`: ASGI). A header counts before `--ttft-slo-ms` and `--itl-slo-ms`; 0 asks for
    none.

    Raises InvalidParameter, naming the header.
    """
    return Targets(
        _ms(scope, TTFT_HEADER, settings.ttft_slo_ms) / 1000,
        _ms(scope, ITL_HEADER, settings.itl_slo_ms) / 1000,
    )


def left(targets: Targets, elapsed_s: float) -> Targets:
    """Of targets, for what is planned after so long."""
    ttft_s = max(AT_ONCE_S, targets.ttft_s - elapsed_s) if targets.ttft_s else 0.0
    return replace(targets, ttft_s=ttft_s)


def _ms(scope: Mapping[str, Any], name: str, default: float) -> float:
    text = header(scope, name)
    if text is None:
        return default
    if not _MS.fullmatch(text):
        raise InvalidParameter(
            f"the header {name} should be milliseconds such as 250 or 37.5, or 0 for none", param=name
        )
    return float(text)
