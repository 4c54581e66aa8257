"""A child ends with its parent, however that ended: a worker with `baton serve`, a rank with its worker.

The child asks for this itself, once it runs: code between fork and exec is unsafe in a process with
threads, and makes gRPC's fork handlers speak up.
"""

from __future__ import annotations

import ctypes
import os
import signal
from collections.abc import Mapping

from core.settings import ENV_PREFIX

PARENT = f"{ENV_PREFIX}PARENT_PID"
"""Environment variable: the process id of the parent."""

_PR_SET_PDEATHSIG = 1


def ask(number: signal.Signals = signal.SIGTERM) -> None:
    """Get that signal when the present parent ends; it holds on over exec."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, number)


def end_with_parent(environ: Mapping[str, str], number: signal.Signals = signal.SIGTERM) -> None:
    """Get that signal when the parent named in `environ` ends; SystemExit when it is gone already."""
    if PARENT not in environ:
        return
    ask(number)
    if str(os.getppid()) != environ[PARENT]:
        raise SystemExit(1)
