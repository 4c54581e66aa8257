"""Lets these tests use the cases and checks beside the interpreted ones."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1] / "engine"))
