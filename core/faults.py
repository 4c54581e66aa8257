"""Named fault points, so that tests of real processes can fail, delay or hold one step exactly.

`--faults "engine.step@3=raise,transfer.read=delay:2,decode.start=hold:/tmp/gate"`: at the third hit of
`engine.step` raise, delay each `transfer.read` by two seconds, and stand still at `decode.start` for as long
as the file /tmp/gate is there. Off, a point costs one dictionary look-up.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from core.errors import ConfigError

POINTS = {
    "engine.step": "before the model runs a step",
    "prefill.start": "when a prefill worker takes up a job, before it is queued",
    "prefill.publish": "before a prefill worker announces blocks",
    "transfer.read": "before the bytes of a read are copied, on the transfer thread",
    "transfer.verify": "after a read, before lease and checksum are checked",
    "decode.start": "when a decode worker takes up a request, before it is queued",
}

LOOK_EVERY_S = 0.005
LONGEST_HOLD_S = 60.0
"""A test that died leaves its gates closed."""


class InjectedFault(RuntimeError):
    """What a fault point raises; nothing else in the project raises it."""


@dataclass
class Gate:
    """A file that holds whoever passes while it exists, but for the first so many that it names as a number.
    Put it there whole (rename); `path`.held says that somebody stands before it. One thread passes at a time.
    """

    path: Path
    _seen: tuple[int, int] | None = None
    _passed: int = 0

    def holds(self) -> bool:
        """Whether this hit is held, which is counted."""
        try:
            status, free = self.path.stat(), int(self.path.read_text())
        except OSError:
            self._seen, self._passed = None, 0
            return False
        seen = status.st_ino, status.st_mtime_ns
        self._passed = self._passed + 1 if seen == self._seen else 1
        self._seen = seen
        return self._passed > free

    def pauses(self) -> Iterator[float]:
        """Seconds to sleep, one after another, until the file is gone."""
        held, ends_at = Path(f"{self.path}.held"), time.monotonic() + LONGEST_HOLD_S
        held.write_text(str(os.getpid()))
        try:
            while self.path.exists() and time.monotonic() < ends_at:
                yield LOOK_EVERY_S
        finally:
            held.unlink(missing_ok=True)


@dataclass
class _Fault:
    at: int | None
    delay_s: float | None = None
    gate: Gate | None = None
    hits: int = field(default=0)

    def pauses(self, name: str) -> Iterable[float]:
        self.hits += 1
        if self.at is not None and self.hits != self.at:
            return ()
        if self.gate is not None:
            return self.gate.pauses() if self.gate.holds() else ()
        if self.delay_s is None:
            raise InjectedFault(f"fault injected at {name}, hit {self.hits}")
        return (self.delay_s,)


_active: dict[str, _Fault] = {}


def configure(spec: str) -> None:
    """Replace all active faults by those in `spec` ("" = none). Raises ConfigError."""
    _active.clear()
    for item in filter(None, (part.strip() for part in spec.split(","))):
        head, _, action = item.partition("=")
        name, _, count = head.partition("@")
        if name not in POINTS:
            raise ConfigError(f"fault point {name!r} is not known; known: {', '.join(POINTS)}")
        kind, _, argument = action.partition(":")
        try:
            at = int(count) if count else None
            delay_s = float(argument) if kind == "delay" else None
        except ValueError:
            raise ConfigError(f"fault {item!r}: numbers expected after '@' and 'delay:'") from None
        if kind not in ("raise", "delay", "hold") or (kind == "hold") != argument.startswith("/"):
            raise ConfigError(f"fault {item!r}: the action is raise, delay:SECONDS or hold:/PATH")
        _active[name] = _Fault(at, delay_s, Gate(Path(argument)) if kind == "hold" else None)


def hit(name: str) -> None:
    """Pass a fault point on a thread that may block. Raises InjectedFault or sleeps if a test said so."""
    for pause_s in _pauses(name):
        time.sleep(pause_s)


async def reached(name: str) -> None:
    """`hit` on an event loop, which goes on meanwhile."""
    for pause_s in _pauses(name):
        await asyncio.sleep(pause_s)


def _pauses(name: str) -> Iterable[float]:
    fault = _active.get(name)
    return () if fault is None else fault.pauses(name)
