"""The flags of each command, made from `core.settings.Settings`, so each setting is declared once."""

from __future__ import annotations

import argparse
import difflib
import types
import typing
from collections.abc import Sequence
from typing import Any, Literal, get_args, get_origin

from core.errors import ConfigError
from core.settings import Settings

COMMANDS = {
    "serve": "router, prefill and decode workers on this machine",
    "router": "the OpenAI-compatible router alone",
    "prefill": "one prefill worker",
    "decode": "one decode worker",
    "config": "print every setting, its value and where that came from",
    "version": "print the version",
}


def parse(argv: Sequence[str] | None) -> dict[str, Any]:
    """Command, config file and the settings given. Raises ConfigError for a flag nobody knows."""
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
        if command != "version":
            _add_settings(sub)
    return parser


def _add_settings(parser: argparse.ArgumentParser) -> None:
    for name, field in Settings.model_fields.items():
        flag = _flag(name)
        default = field.default if field.default not in (None, "") else "none"
        text = f"{field.description} (default: {default})".replace("%", "%%")
        if field.annotation is bool:
            parser.add_argument(flag, action=argparse.BooleanOptionalAction, help=text, dest=name)
        else:
            parser.add_argument(flag, help=text, dest=name, metavar=_metavar(field.annotation))


def _metavar(annotation: Any) -> str:
    if get_origin(annotation) is Literal:
        return "{" + ",".join(map(str, get_args(annotation))) + "}"
    if get_origin(annotation) in (typing.Union, types.UnionType):
        annotation = next(kind for kind in get_args(annotation) if kind is not type(None))
    return {int: "N", float: "SECONDS"}.get(annotation, "TEXT")
