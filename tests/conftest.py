"""One compute thread a process: tests run beside each other's workers on few cores, and OpenMP teams that
share a core are many times slower. Set before anything imports torch. And Hypothesis' profile."""

from __future__ import annotations

import os

from hypothesis import settings

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

# The same cases in every run, so that a failure is a change; `--hypothesis-profile=default` draws others.
settings.register_profile("ci", derandomize=True, print_blob=True, deadline=None)
settings.load_profile("ci")
