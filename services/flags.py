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
    "config": "print every setting, its value and where that came from",
    "version": "print the version",
}


NOT_SETTINGS = ("action", "delete", "yes")
"""What `baton cache` takes beside settings."""

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
        elif command != "version":
            _add_settings(sub, Settings.model_fields)
    return parser


def _add_cache_actions(parser: argparse.ArgumentParser) -> None:
    text = "; ".join(f"{action}: {does}" for action, does in CACHE_ACTIONS.items())
    parser.add_argument("action", choices=CACHE_ACTIONS, help=text)
    parser.add_argument("--delete", action="store_true", default=False, help="verify: delete what is damaged")
    parser.add_argument("--yes", action="store_true", default=False, help="clear: do it")


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
