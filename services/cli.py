"""The command line: `baton serve`, or one process at a time with `baton router|prefill|decode`.

What takes time to import is imported in functions: Ctrl-C meanwhile ends without a traceback, and a
router without torch.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from core.errors import ConfigError
from services import orphan

if TYPE_CHECKING:
    from core.settings import Origin, Settings


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; exit status 2 and one sentence for what the operator has to change."""
    orphan.end_with_parent(os.environ)
    try:
        return _run(*_prepare(argv))
    except ConfigError as error:
        print(f"baton: {error.message}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130


def _prepare(argv: Sequence[str] | None) -> tuple[str, Settings, dict[str, Origin]]:
    """The command and its settings; logs and metrics are set up."""
    from prometheus_client import disable_created_metrics

    from core import log
    from core.settings import load
    from services.flags import parse

    arguments = parse(argv)
    command, config = arguments.pop("command"), arguments.pop("config")
    settings, origins = load(arguments, os.environ, config)
    log.configure(settings.log_level, settings.log_format, process=command)
    disable_created_metrics()  # a series beside each counter and histogram that nobody reads
    return command, settings, origins


def _run(command: str, settings: Settings, origins: dict[str, Origin]) -> int:
    match command:
        case "serve":
            from services.launch import serve

            return serve(settings)
        case "router":
            from services.router.main import run as run_router

            return run_router(settings)
        case "prefill" | "decode":
            from services.decode.service import attach as attach_decode
            from services.prefill.service import attach as attach_prefill
            from services.worker.process import run as run_worker

            return run_worker(settings, command, (attach_prefill, attach_decode))
        case "config":
            for name, origin in sorted(origins.items()):
                shown = "***" if name == "api_key" and origin.value else origin.value
                print(f"{name:24} {shown!s:32} {origin.source}")
            return 0
        case _:
            from services.version import VERSION

            print(VERSION)
            return 0


if __name__ == "__main__":
    sys.exit(main())
