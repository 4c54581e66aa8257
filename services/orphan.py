"""A child of `baton serve` ends with it, however the launcher ended.

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
"""Environment variable: the process id of the launcher."""

_PR_SET_PDEATHSIG = 1


def end_with_parent(environ: Mapping[str, str]) -> None:
    """Get SIGTERM when the launcher named in `environ` ends; SystemExit when it is gone already."""
    if PARENT not in environ:
        return
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    if str(os.getppid()) != environ[PARENT]:
        raise SystemExit(1)
