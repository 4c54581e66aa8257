"""Which faults are tried on whom and when, and what has to come of it. Pure.

    fault    what happens to the victim
    victim   a process that has to do with the request; for router and worker the cut is the one between them
    moment   how far the request is
    style    how the client asks: streamed or not, with one choice or two

Every triple of fault, victim and moment that makes sense is a cell, in one of the styles. These go round, so
that each of them meets each fault, each victim and each moment.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Fault(StrEnum):
    KILL = "kill"
    STOP = "stop"  # SIGSTOP; it goes on once the answer is there
    TERM = "term"
    CUT = "cut"  # its connections end, and new ones are not to be had for a while
    SILENCE = "silence"  # its connections stay, and nothing passes


class Victim(StrEnum):
    P = "prefill"
    D = "decode"
    ROUTER = "router"


class Moment(StrEnum):
    QUEUE = "queue"  # the victim has it and has not begun it
    PREFILL = "prefill"
    HANDOFF = "handoff"  # the decode worker reads blocks
    DECODE = "decode"  # about half of the answer is out
    LAST = "last"  # all but the last token are out


@dataclass(frozen=True)
class Style:
    stream: bool
    n: int

    def __str__(self) -> str:
        return f"{'stream' if self.stream else 'whole'}-n{self.n}"


STYLES = [Style(True, 1), Style(False, 2), Style(True, 2), Style(False, 1)]


@dataclass(frozen=True)
class Cell:
    fault: Fault
    victim: Victim
    moment: Moment
    style: Style

    def __str__(self) -> str:
        return f"{self.fault}-{self.victim}-{self.moment}-{self.style}"

    @property
    def is_answered(self) -> bool:
        """Only the client of a router that dies gets none."""
        return (self.fault, self.victim) != (Fault.KILL, Victim.ROUTER)

    @property
    def resumes(self) -> set[int]:
        """How often the request may go on elsewhere. Who leaves in good order finishes; a router that was
        stopped may find on waking that its workers have been silent for long, or that they have not."""
        lost = self.fault is not Fault.TERM
        if self.victim is Victim.D:
            return {int(lost)}
        if self.victim is Victim.ROUTER and lost and self.moment is not Moment.QUEUE:
            return {0, 1} if self.fault is Fault.STOP else {1}
        return {0}


def skipped(fault: Fault, victim: Victim) -> str:
    """Why this is tried at no moment; empty where it is tried at all."""
    if fault is Fault.SILENCE and victim is Victim.ROUTER:
        return "to its workers a router in silence is one that is stopped, to the client one that is cut off"
    return ""


CELLS = [
    Cell(fault, victim, moment, STYLES[(row + column + number) % len(STYLES)])
    for row, fault in enumerate(Fault)
    for column, victim in enumerate(Victim)
    for number, moment in enumerate(Moment)
    if not skipped(fault, victim)
]
