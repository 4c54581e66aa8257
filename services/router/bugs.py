"""Errors that nobody foresaw."""

from __future__ import annotations

import traceback

from core import log
from core.errors import BatonError

logger = log.get("router")


def reported(error: BaseException) -> BatonError:
    """Log where a bug struck, without its message, which may quote a prompt; returns what to tell clients."""
    frames = traceback.extract_tb(error.__traceback__)
    where = [f"{frame.filename}:{frame.lineno} {frame.name}" for frame in frames]
    logger.error("router.bug", kind=type(error).__name__, where=where)
    return BatonError("the router failed; its log says where")
