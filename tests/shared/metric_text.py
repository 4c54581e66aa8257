"""Reads the Prometheus text format."""

from __future__ import annotations


def families(text: str) -> set[str]:
    """Names of metrics as they are written, counters with `_total`; without the `_created` of tests' processes."""
    names = {line.split()[2] for line in text.splitlines() if line.startswith("# TYPE ")}
    return {name for name in names if not name.endswith("_created")}


def series(text: str) -> set[str]:
    """Every name with its labels."""
    return {line.rpartition(" ")[0] for line in text.splitlines() if line and not line.startswith("#")}
