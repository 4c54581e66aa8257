"""Measurements. Each file prints one table; `docs/performance.md` says which command gave which figure."""
