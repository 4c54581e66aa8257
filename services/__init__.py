"""Processes: routers and workers, their servers and their lives."""
