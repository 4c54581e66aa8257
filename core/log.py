"""Structured logs: one line an event, JSON where nobody watches, colours on a terminal.

Never log prompts, answers or keys. Events are short nouns with fields: `log.info("worker.ready", id=...)`.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable

import orjson
import structlog

_bound: dict[str, str] = {}
"""Fields of the process; not context variables, which a thread would not have."""


def configure(level: str, form: str = "auto", **bound: str) -> None:
    """Set up logging for this process on stderr; `bound` fields stand on every line, those of
    earlier calls too.

    `form`: "json", "console", or "auto" = console where stderr is a terminal.
    """
    console = form == "console" or (form == "auto" and sys.stderr.isatty())
    rendered = (
        # It formats exceptions itself, by default with the frames' local variables: prompts and keys.
        [structlog.dev.ConsoleRenderer(exception_formatter=structlog.dev.plain_traceback)]
        if console
        else [structlog.processors.format_exc_info, structlog.processors.JSONRenderer(_dumps)]
    )
    structlog.configure(
        processors=[
            _add_bound,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            *rendered,
        ],
        wrapper_class=structlog.make_filtering_bound_logger(getattr(logging, level.upper())),
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
        cache_logger_on_first_use=True,
    )
    _bound.update(bound)


def _dumps(event: structlog.typing.EventDict, default: Callable[[object], object]) -> str:
    return orjson.dumps(event, default=default).decode()


def _add_bound(_: object, __: str, event: structlog.typing.EventDict) -> structlog.typing.EventDict:
    event.update(_bound)
    return event


def get(name: str) -> structlog.typing.FilteringBoundLogger:
    return structlog.get_logger(room=name)
