"""Named fault points, so that tests of real processes can fail or delay one step exactly.

`--faults "engine.step@3=raise,transfer.read=delay:2"`: at the third hit of `engine.step` raise, and
delay each `transfer.read` by two seconds. Off, a point costs one dictionary look-up.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

from core.errors import ConfigError

POINTS = {
    "engine.step": "before the model runs a step",
    "prefill.publish": "before a prefill worker announces blocks",
    "transfer.read": "before the bytes of a read are copied, on the transfer thread",
    "transfer.verify": "after a read, before lease and checksum are checked",
    "decode.start": "when a decode worker takes up a request, before it is queued",
}


class InjectedFault(RuntimeError):
    """What a fault point raises; nothing else in the project raises it."""


@dataclass
class _Fault:
    at: int | None
    delay_s: float | None
    hits: int = 0


_active: dict[str, _Fault] = {}


def configure(spec: str) -> None:
    """Replace all active faults by those in `spec` ("" = none). Raises ConfigError."""
    _active.clear()
    for item in filter(None, (part.strip() for part in spec.split(","))):
        head, _, action = item.partition("=")
        name, _, count = head.partition("@")
        if name not in POINTS:
            raise ConfigError(f"fault point {name!r} is not known; known: {', '.join(POINTS)}")
        kind, _, seconds = action.partition(":")
        try:
            delay_s = float(seconds) if kind == "delay" else None
            at = int(count) if count else None
        except ValueError:
            raise ConfigError(f"fault {item!r}: numbers expected after '@' and 'delay:'") from None
        if kind not in ("raise", "delay"):
            raise ConfigError(f"fault {item!r}: the action is raise or delay:SECONDS")
        _active[name] = _Fault(at, delay_s)


def hit(name: str) -> None:
    """Pass a fault point; raises InjectedFault or sleeps when a test asked for it.

    Blocks: call it only where blocking is allowed (engine and transfer threads); elsewhere use
    `due` and wait without blocking.
    """
    delay_s = due(name)
    if delay_s:
        time.sleep(delay_s)


def due(name: str) -> float:
    """Like `hit`, but returns the delay in seconds instead of sleeping."""
    fault = _active.get(name)
    if fault is None:
        return 0.0
    fault.hits += 1
    if fault.at is not None and fault.hits != fault.at:
        return 0.0
    if fault.delay_s is None:
        raise InjectedFault(f"fault injected at {name}, hit {fault.hits}")
    return fault.delay_s
