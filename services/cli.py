"""The command line: `baton serve`, or one process at a time with `baton router|prefill|decode`.

What takes time to import is imported in functions: Ctrl-C meanwhile ends without a traceback, and a
router without torch.
"""

from __future__ import annotations

import os
import re
import signal
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from core.errors import ConfigError
from services import orphan

if TYPE_CHECKING:
    from core.settings import Origin, Settings


_PROCESSES = ("router", "prefill", "decode")


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; exit status 2 and one sentence for what the operator has to change."""
    if next(iter(sys.argv[1:] if argv is None else argv), "") in _PROCESSES:
        # Until it has handlers of its own there is nothing to end in order, also within an import.
        signal.signal(signal.SIGTERM, lambda *_: os._exit(0))
        signal.signal(signal.SIGINT, lambda *_: os._exit(130))
    orphan.end_with_parent(os.environ)
    try:
        return _run(*_prepare(argv))
    except ConfigError as error:
        print(f"baton: {error.message}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130


def _prepare(argv: Sequence[str] | None) -> tuple[str, Settings, dict[str, Origin], dict[str, Any]]:
    """The command, its settings and what it takes beside settings; logs and metrics are set up."""
    from prometheus_client import disable_created_metrics

    from core import log
    from core.settings import load
    from services.flags import NOT_SETTINGS, parse

    arguments = parse(argv)
    command, config = arguments.pop("command"), arguments.pop("config")
    options = {name: arguments.pop(name) for name in NOT_SETTINGS if name in arguments}
    settings, origins = load(arguments, os.environ, config)
    log.configure(settings.log_level, settings.log_format, process=command)
    disable_created_metrics()  # a series beside each counter and histogram that nobody reads
    return command, settings, origins, options


def _run(command: str, settings: Settings, origins: dict[str, Origin], options: dict[str, Any]) -> int:
    if options.pop("check", False):
        from services.check import check

        check(settings, command)
        return 0
    match command:
        case "serve":
            from services.launch import serve

            return serve(settings)
        case "router":
            from services.router.main import run as run_router

            return run_router(settings)
        case "prefill" | "decode":
            from services.worker import cpu

            place = cpu.confine(
                settings
            )  # before the imports that load torch: OpenMP reads its settings then
            from services.decode.service import attach as attach_decode
            from services.prefill.service import attach as attach_prefill
            from services.worker.process import run as run_worker

            return run_worker(settings, command, (attach_prefill, attach_decode), *place)
        case "cache":
            from services.cache import run as run_cache

            return run_cache(settings, **options)
        case "explain":
            from services.explain import run as run_explain

            return run_explain(settings, **options)
        case "role":
            from services.role import run as run_role

            return run_role(settings, **options)
        case "config":
            for name, origin in sorted(origins.items()):
                secret = name in ("api_key", "api_keys", "cluster_token") and origin.value
                shown = "***" if secret else _without_password(str(origin.value))
                print(f"{name:24} {shown!s:32} {origin.source}")
            return 0
        case _:
            from services.version import VERSION

            print(VERSION)
            return 0


def _without_password(value: str) -> str:
    """A URL as redis-py takes it may hold one before its host or behind `?`."""
    return re.sub(r"(?<=[?&]password=)[^&]*", "***", re.sub(r"//[^/@]*@", "//***@", value))


if __name__ == "__main__":
    sys.exit(main())
