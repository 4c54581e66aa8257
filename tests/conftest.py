"""One compute thread a process: tests run beside each other's workers on few cores, and OpenMP teams that
share a core are many times slower. Set before anything imports torch."""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
