"""Chat messages to a prompt, through the model's own Jinja template, as transformers renders it."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from functools import lru_cache
from typing import Any, NoReturn

import jinja2
from jinja2.sandbox import ImmutableSandboxedEnvironment

from checkpoint.tokenizer import Tokenizer
from core.errors import InvalidParameter

Message = Mapping[str, Any]
_PARAM = "messages"


def render_chat(tokenizer: Tokenizer, messages: Sequence[Message], add_generation_prompt: bool = True) -> str:
    """The prompt text of a conversation, whose contents are strings. Raises InvalidParameter, naming
    `messages`."""
    if tokenizer.chat_template is None:
        raise InvalidParameter("this model has no chat template; use /v1/completions", param=_PARAM)
    try:
        return _compiled(tokenizer.chat_template).render(
            messages=messages,
            add_generation_prompt=add_generation_prompt,
            tools=None,
            documents=None,
            **tokenizer.special_literals,
        )
    except Exception as error:  # a template is foreign code: whatever it raises is about its input
        raise InvalidParameter(
            f"the model's chat template does not accept these messages: {error}; "
            f"change them or use /v1/completions",
            param=_PARAM,
        ) from None


def encode_chat(
    tokenizer: Tokenizer,
    messages: Sequence[Message],
    special_tokens_in_content: bool = False,
    add_generation_prompt: bool = True,
) -> list[int]:
    """Token ids of a conversation. Raises InvalidParameter, naming `messages`.

    The template alone decides about BOS and turn marks. Control strings that stand in the messages
    themselves are encoded as plain text, so that no content can open a turn of another role, unless
    `special_tokens_in_content`.
    """
    turns = list(messages)
    guarded = turns if special_tokens_in_content else _map_strings(tokenizer.guard, turns)
    text = render_chat(tokenizer, guarded, add_generation_prompt)
    if guarded == turns:
        return tokenizer.encode(text, add_special=False)
    return tokenizer.encode_guarded(text, add_special=False)


def _map_strings(change: Callable[[str], str], value: Any) -> Any:
    """Apply `change` to every string of a JSON-like value, names of fields included."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, Mapping):
        return {_map_strings(change, key): _map_strings(change, item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_map_strings(change, item) for item in value]
    return value


@lru_cache(maxsize=8)
def _compiled(template: str) -> jinja2.Template:
    return _environment().from_string(template)


def _environment() -> ImmutableSandboxedEnvironment:
    """What templates may rely on (transformers' chat templating): options, filters and functions."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Like Jinja's own, but without HTML escapes: the output is for a model, not a browser."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)
