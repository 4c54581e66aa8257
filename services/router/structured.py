"""What an answer has to look like, as the client says it -> a Lark grammar for llguidance.

JSON is compact: one space after a colon or comma at most, since small models would otherwise fill
the answer with whitespace.
"""

from __future__ import annotations

from typing import Any

import orjson
from llguidance import LLMatcher, regex_to_lark
from llguidance.gbnf_to_lark import gbnf_to_lark

from checkpoint.grammar import refusal
from core.request import Grammar
from services.router.schemas import GenerationBody, StructuredOutputs

MAX_SCHEMA_CHARS = 2**16
ANY_OBJECT = {"type": "object"}
JSON_OPTIONS: Any = {
    "whitespace_flexible": False,
    "item_separator": ", ?",
    "key_separator": ": ?",
    "lenient": False,
}
UNFORCED = '%llguidance {"no_forcing": true}'
"""Else text that can only go on one way is worked out to its end within one mask: `a{1000}{1000}` takes
a second of the engine's. The last such line of a grammar counts."""


def is_asked_for(body: GenerationBody) -> bool:
    """Whether the answer is restricted by a grammar."""
    return body.structured_outputs is not None or body.has_format


def grammar_of(body: GenerationBody) -> Grammar:
    """What a body that asks for a grammar asks for, not yet checked; on a `GrammarThread` only.

    Raises InvalidParameter for what cannot even be written as a grammar.
    """
    if body.structured_outputs is not None:
        return _of_structured_outputs(body.structured_outputs)
    form = body.response_format
    assert form is not None
    if form.json_schema is None:
        return _of_schema(ANY_OBJECT, "response_format")
    return _of_schema(form.json_schema.schema_, "response_format.json_schema.schema")


def _of_structured_outputs(asked: StructuredOutputs) -> Grammar:
    """Exactly one field is set, the body's check has seen to that."""
    if asked.regex is not None:
        return Grammar(_of_regex(asked.regex), "structured_outputs.regex")
    if asked.choice is not None:
        return Grammar(_of_choice(asked.choice), "structured_outputs.choice")
    if asked.grammar is not None:
        return _of_grammar(asked.grammar, "structured_outputs.grammar")
    if asked.json_ is not None:
        return _of_schema(asked.json_, "structured_outputs.json")
    return _of_schema(ANY_OBJECT, "structured_outputs.json_object")


def _of_regex(regex: str) -> str:
    r"""`\d` and `\w` are ASCII, as in JSON schemas: else a model may well answer in Thai digits."""
    return _of_lark(f"start: /{regex_to_lark(regex, 'dw')}/")


def _of_choice(choice: list[str]) -> str:
    """One terminal: a rule's alternatives are limited in number, a terminal's are not."""
    quoted = " | ".join(orjson.dumps(text).decode() for text in choice)
    return _of_lark(f"start: CHOICE\nCHOICE: {quoted}")


def _of_grammar(text: str, param: str) -> Grammar:
    """`::=` is GBNF's sign; everything else is read as Lark."""
    try:
        return Grammar(_of_lark(gbnf_to_lark(text) if "::=" in text else text), param)
    except Exception as error:  # the converter raises bare Exception, and RecursionError
        raise refusal(param, str(error)) from None


def _of_schema(schema: dict[str, Any], param: str) -> Grammar:
    try:
        text = orjson.dumps(schema).decode()
        if len(text) > MAX_SCHEMA_CHARS:
            raise refusal(
                param, f"{len(text)} characters are too many, at most {MAX_SCHEMA_CHARS} are compiled"
            )
        made = orjson.loads(LLMatcher.grammar_from_json_schema(text, overrides=JSON_OPTIONS))
        compact = orjson.dumps(made["grammars"][0]["json_schema"]).decode()
        return Grammar(_of_lark(f"start: %json {compact}"), param)
    except (ValueError, TypeError) as error:  # too deep for either library
        raise refusal(param, str(error)) from None


def _of_lark(text: str) -> str:
    return f"{text}\n{UNFORCED}\n"
