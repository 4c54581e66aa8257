"""`docs/api.md` is true: every route, parameter with its default and limits, reason, header and code."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from core import errors
from core.settings import Settings
from planning.plan import Reason
from services.router.app import create_app
from services.router.gate import MethodNotAllowed
from services.router.parse import NO_EFFECT
from services.router.router import Router
from services.router.schemas import (
    ChatBody,
    CompletionBody,
    DetokenizeBody,
    GenerationBody,
    JsonSchema,
    Message,
    ResponseFormat,
    StreamOptions,
    StructuredOutputs,
    TokenizeBody,
)

DOCS = (Path(__file__).parents[2] / "docs" / "api.md").read_text()
MODELS = (
    *(CompletionBody, ChatBody, TokenizeBody, DetokenizeBody, Message, StreamOptions),
    *(ResponseFormat, JsonSchema, StructuredOutputs),
)
LIMITS = ("minimum", "maximum", "exclusiveMinimum", "maxItems", "maxLength", "maxProperties")
BEYOND_TABLES = 2**31  # a limit that only says how many bits a number has


def section(title: str) -> str:
    """The text under a heading, up to the next one."""
    return re.split(r"^#+ .*$", DOCS.split(title + "\n", 1)[1], maxsplit=1, flags=re.MULTILINE)[0]


def rows(text: str) -> dict[str, list[str]]:
    """Table rows by each name in backticks of their first cell."""
    cells = [line.strip("|").split(" | ") for line in text.splitlines() if line.startswith("| `")]
    return {name: row for row in cells for name in re.findall(r"`([^`]+)`", row[0])}


def limits(schema: Any) -> Iterator[float]:
    if isinstance(schema, dict):
        yield from (schema[name] for name in LIMITS if name in schema)
        schema = list(schema.values())
    if isinstance(schema, list):
        for inner in schema:
            yield from limits(inner)


@pytest.mark.parametrize(
    ("title", "model", "inherited"),
    [
        ("### Both endpoints", GenerationBody, None),
        ("### `POST /v1/completions`", CompletionBody, GenerationBody),
        ("### `POST /v1/chat/completions`", ChatBody, GenerationBody),
    ],
)
def test_each_parameter_has_a_row_with_its_default_and_limits(title, model, inherited):
    table = rows(section(title))
    fields = model.model_fields.keys() - (inherited.model_fields.keys() if inherited else set())
    assert table.keys() == fields
    schemas = model.model_json_schema()["properties"]
    for name in fields:
        row = table[name]
        default = schemas[name].get("default")
        if default is not None:
            assert row[2] == f"`{json.dumps(default)}`", name
        elif model.model_fields[name].is_required():
            assert row[2] == "required", name
        numbers = set(map(float, re.findall(r"-?\d+", " ".join(row))))
        wanted = {float(limit) for limit in limits(schemas[name]) if abs(limit) < BEYOND_TABLES}
        assert wanted <= numbers, (name, wanted)


def test_every_name_is_there():
    fields = {field.alias or name for model in MODELS for name, field in model.model_fields.items()}
    names = fields | NO_EFFECT.keys()
    assert [name for name in names if not re.search(rf"[`\"]{name}[`\"]", DOCS)] == []
    paths = create_app(Router(Settings())).openapi()["paths"]
    assert [path for path in paths if f"{path}`" not in DOCS] == []


def test_every_reason_has_a_line_and_no_other():
    table = rows(section("## Headers").split("| `X-Baton-Reason` | plan", 1)[1])
    assert table.keys() == set(Reason)


def kinds(kind: type[errors.BatonError]) -> Iterator[type[errors.BatonError]]:
    yield kind
    for child in kind.__subclasses__():
        yield from kinds(child)


def test_every_error_code_has_its_status_and_type():
    listed = set(re.findall(r"^\| (\d+) \| `(\w+)` \| `(\w+)` \|", section("## Errors"), re.MULTILINE))
    # A source's failure is a miss, never an answer; other rooms add kinds of it when they are imported.
    shown = [
        *(k for k in kinds(errors.BatonError) if not issubclass(k, errors.SourceFailed)),
        MethodNotAllowed,
    ]
    raised = {(str(k.http_status), k.code, k.error_type) for k in shown}
    assert listed == raised
