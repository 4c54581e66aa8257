"""Seconds at work: two operations at once take no longer than one."""

from __future__ import annotations

from contextlib import suppress

import pytest

from kvtransfer.busy import BusyTime


@pytest.mark.parametrize(
    ("turns", "seconds"),
    [
        ("(1)", 1.0),
        ("(1)2(4)", 5.0),
        ("(1(2)4)", 7.0),
        ("(1(2)4)8(16)", 23.0),
        ("(1", 0.0),
    ],
)
def test_time_counts_once_and_only_while_something_runs(turns: str, seconds: float) -> None:
    """`(` begins an operation, `)` ends the last one begun, digits let so many seconds pass."""
    now = 0.0
    busy, running = BusyTime(lambda: now), []
    for turn in turns.replace("(", " ( ").replace(")", " ) ").split():
        if turn == "(":
            running.append(busy.running())
            running[-1].__enter__()
        elif turn == ")":
            running.pop().__exit__(None, None, None)
        else:
            now += float(turn)
    assert busy.seconds == seconds


def test_an_operation_that_raises_has_ended() -> None:
    now = 0.0
    busy = BusyTime(lambda: now)
    with suppress(OSError), busy.running():
        now += 1
        raise OSError
    now += 1
    assert busy.seconds == 1.0
