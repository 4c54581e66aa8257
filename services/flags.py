"""The flags of each command, made from `core.settings.Settings`, so each setting is declared once."""

from __future__ import annotations

import argparse
import difflib
import types
import typing
from collections.abc import Iterable, Sequence
from typing import Any, Literal, get_args, get_origin

from core.errors import ConfigError
from core.settings import Settings

COMMANDS = {
    "serve": "router, prefill and decode workers on this machine",
    "router": "the OpenAI-compatible router alone",
    "prefill": "one prefill worker",
    "decode": "one decode worker",
    "cache": "look at, check or empty the caches on disk and in Redis",
    "explain": "why a request was planned as it was, and what it took; without an id, the newest ones",
    "role": "let a worker take the other role: prefill or decode",
    "config": "print every setting, its value and where that came from",
    "version": "print the version",
}


PROCESSES = ("serve", "router", "prefill", "decode")
"""The commands that serve until they are told to stop; all take `--check`."""

NOT_SETTINGS = ("check", "action", "delete", "yes", "request_id", "router", "as_json", "worker", "role")
"""What PROCESSES, `baton cache`, `baton explain` and `baton role` take beside settings."""

CACHE_ACTIONS = {
    "ls": "blocks and bytes by namespace",
    "stat": "totals, and the room there is",
    "verify": "read every block and compare header and checksum",
    "clear": "delete all blocks",
}


def parse(argv: Sequence[str] | None) -> dict[str, Any]:
    """Command, config file, the settings given, for `baton cache` those of NOT_SETTINGS too. Raises
    ConfigError for a flag nobody knows."""
    arguments, unknown = make_parser().parse_known_args(argv)
    if unknown:
        flag = unknown[0].partition("=")[0]
        near = difflib.get_close_matches(flag, map(_flag, Settings.model_fields), n=1)
        hint = f"did you mean {near[0]}?" if near else "baton COMMAND --help lists them all"
        raise ConfigError(f"{flag} is not a setting; {hint}")
    return vars(arguments)


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="baton", description="LLM serving with prefill and decode apart.", allow_abbrev=False
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for command, text in COMMANDS.items():
        sub = commands.add_parser(
            command, help=text, description=text, argument_default=argparse.SUPPRESS, allow_abbrev=False
        )
        sub.add_argument("--config", default=None, metavar="FILE", help="TOML file of settings")
        if command == "cache":
            _add_cache_actions(sub)
            _add_settings(sub, ("disk_cache_dir", "redis_url"))
        elif command == "explain":
            _add_explain(sub)
            _add_settings(sub, ("host", "port", "api_key"))
        elif command == "role":
            _add_role(sub)
            _add_settings(sub, ("admin_host", "admin_port", "api_key"))
        elif command != "version":
            if command in PROCESSES:
                text = "read the settings, say what is wrong with them (exit status 2), serve nothing"
                sub.add_argument("--check", action="store_true", help=text)
            _add_settings(sub, Settings.model_fields)
    return parser


def _add_cache_actions(parser: argparse.ArgumentParser) -> None:
    text = "; ".join(f"{action}: {does}" for action, does in CACHE_ACTIONS.items())
    parser.add_argument("action", choices=CACHE_ACTIONS, help=text)
    parser.add_argument("--delete", action="store_true", default=False, help="verify: delete what is damaged")
    parser.add_argument("--yes", action="store_true", default=False, help="clear: do it")


def _add_explain(parser: argparse.ArgumentParser) -> None:
    text = "its id, the id of its answer or its X-Request-Id"
    parser.add_argument("request_id", nargs="?", default=None, metavar="REQUEST_ID", help=text)
    text = "where the router is (default: on this machine at --host and --port)"
    parser.add_argument("--router", default="", metavar="URL", help=text)
    text = "print what the router says, as it is"
    parser.add_argument("--json", dest="as_json", action="store_true", default=False, help=text)


def _add_role(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("worker", metavar="WORKER", help="its id in /v1/cluster")
    parser.add_argument("role", choices=("prefill", "decode"))
    text = "a router's admin port (default: on this machine at --admin-host and --admin-port)"
    parser.add_argument("--router", default="", metavar="URL", help=text)


def _add_settings(parser: argparse.ArgumentParser, names: Iterable[str]) -> None:
    for name in names:
        field = Settings.model_fields[name]
        flag = _flag(name)
        default = field.default if field.default not in (None, "") else "none"
        text = f"{field.description} (default: {default})".replace("%", "%%")
        if field.annotation is bool:
            parser.add_argument(flag, action=argparse.BooleanOptionalAction, help=text, dest=name)
        else:
            parser.add_argument(flag, help=text, dest=name, metavar=_metavar(name, field.annotation))


def _metavar(name: str, annotation: Any) -> str:
    if get_origin(annotation) is Literal:
        return "{" + ",".join(map(str, get_args(annotation))) + "}"
    if get_origin(annotation) in (typing.Union, types.UnionType):
        annotation = next(kind for kind in get_args(annotation) if kind is not type(None))
    return {int: "N", float: "SECONDS" if name.endswith("_s") else "X"}.get(annotation, "TEXT")
