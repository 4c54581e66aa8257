"""Dockerfiles as far as ours go: stages, what they copy, what the last one runs."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

_INSTRUCTION = re.compile(r"([A-Z]+)\s+(.*)", re.DOTALL)


@dataclass(frozen=True, slots=True)
class Copy:
    """`stage`: the one that it copies from, empty = the build's context."""

    sources: tuple[str, ...]
    target: str
    stage: str


@dataclass(slots=True)
class Stage:
    """`installs`: what follows `pip install` in each RUN. `env`, `user`, ...: as the stage ends."""

    image: str
    name: str = ""
    copies: list[Copy] = field(default_factory=list)
    installs: list[list[str]] = field(default_factory=list)
    env: dict[str, str] = field(default_factory=dict)
    user: str = ""
    ports: list[int] = field(default_factory=list)
    healthcheck: list[str] = field(default_factory=list)
    entrypoint: list[str] = field(default_factory=list)
    cmd: list[str] = field(default_factory=list)


def stages(path: Path) -> list[Stage]:
    """ValueError for an instruction that this reader does not know."""
    found: list[Stage] = []
    for name, rest in _instructions(path.read_text()):
        if name == "FROM":
            image, _, alias = rest.partition(" AS ")
            found.append(Stage(image.strip(), alias.strip()))
        else:
            _read(found[-1], name, rest)
    return found


def _instructions(text: str) -> Iterator[tuple[str, str]]:
    lines = [line for line in text.splitlines() if not line.lstrip().startswith("#")]
    for instruction in re.sub(r"\\\n", " ", "\n".join(lines)).splitlines():
        if instruction.strip():
            found = _INSTRUCTION.fullmatch(instruction.strip())
            if found is None:
                raise ValueError(f"not an instruction: {instruction}")
            yield found[1], found[2]


def _read(stage: Stage, name: str, rest: str) -> None:
    match name:
        case "COPY":
            words = shlex.split(rest)
            origin = [word.removeprefix("--from=") for word in words if word.startswith("--from=")]
            *sources, target = [word for word in words if not word.startswith("--")]
            stage.copies.append(Copy(tuple(sources), target, "".join(origin)))
        case "RUN":
            stage.installs += [
                command.split("pip install", 1)[1].split()
                for command in rest.split("&&")
                if "pip install" in command
            ]
        case "ENV":
            stage.env |= dict(pair.split("=", 1) for pair in shlex.split(rest))
        case "USER":
            stage.user = rest
        case "EXPOSE":
            stage.ports = [int(port) for port in rest.split()]
        case "HEALTHCHECK":
            stage.healthcheck = json.loads(rest.partition("CMD")[2])
        case "ENTRYPOINT":
            stage.entrypoint = json.loads(rest)
        case "CMD":
            stage.cmd = json.loads(rest)
        case "WORKDIR" | "ARG":
            pass
        case _:
            raise ValueError(f"{name} is not read here")
