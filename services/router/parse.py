"""From the bytes of a body to a checked request, or to an error that names the parameter.

Error messages never repeat the client's values, only names and what was expected.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Mapping, MutableMapping
from typing import Any, TypeVar

import orjson
from pydantic import BaseModel, ValidationError

from core.errors import InvalidParameter, PayloadTooLarge, RequestError
from services.router import schemas
from services.router.body import UNKNOWN_NAME
from services.router.headers import header
from services.router.schemas import GenerationBody

BODY_TIMEOUT_S = 60.0
"""A client that sends its body more slowly holds a place that others could use."""

MAX_PARTS = 2**17
"""Strings (names too), objects and lists of one body. Making a million takes a second, in which no other
thread runs: the parser holds Python's lock. Numbers are made faster."""

NO_EFFECT: dict[str, tuple[Any, ...]] = {
    "best_of": (1,),
    "suffix": ("",),
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "parallel_tool_calls": (True, False),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "modalities": (["text"],),
    "service_tier": ("auto", "default"),
}
"""Parameters we do not support, with the values that ask for nothing we do not do."""

Model = TypeVar("Model", bound=BaseModel)
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]


async def read_body(scope: Mapping[str, Any], receive: Receive, limit_nbytes: int) -> bytes:
    """The whole body. Raises PayloadTooLarge beyond `limit_nbytes`, RequestError if it does not come."""
    too_large = PayloadTooLarge(f"the body is larger than {limit_nbytes} bytes; send less")
    announced = header(scope, "Content-Length") or ""
    if announced.isdigit() and int(announced) > limit_nbytes:
        raise too_large
    chunks: list[bytes] = []
    size = 0
    try:
        async with asyncio.timeout(BODY_TIMEOUT_S):
            while True:
                message = await receive()
                if message["type"] == "http.disconnect":
                    raise RequestError("the connection closed before the body was complete")
                chunks.append(message.get("body", b""))
                size += len(chunks[-1])
                if size > limit_nbytes:
                    raise too_large
                if not message.get("more_body", False):
                    return b"".join(chunks)
    except TimeoutError:
        raise RequestError(f"the body was not complete after {BODY_TIMEOUT_S:g} s") from None


def parse(body: bytes, kind: type[Model]) -> Model:
    """Check `body` against a model of `schemas`. Raises RequestError or InvalidParameter."""
    if not body.strip():
        raise RequestError("the body is empty; send a JSON object")
    check_num_parts(body)
    try:
        values = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        where = f"line {error.lineno} column {error.colno}"
        raise RequestError(f"the body is not valid JSON: {error.msg} at {where}") from None
    if not isinstance(values, dict):
        raise RequestError("the body should be a JSON object")
    if issubclass(kind, GenerationBody):
        values = _without_no_effect(values)
    try:
        return kind.model_validate(values)
    except ValidationError as error:
        raise _translated(error) from None


def check_num_parts(body: bytes) -> None:
    """Raises PayloadTooLarge beyond MAX_PARTS. What stands in strings does not count, so texts are as long as
    they like."""
    if _num_parts(body, body) <= MAX_PARTS:
        return
    bare = body.replace(b"\\\\", b"").replace(b'\\"', b"")
    if _num_parts(bare, b"") > MAX_PARTS or _num_parts(bare, b"".join(bare.split(b'"')[::2])) > MAX_PARTS:
        raise PayloadTooLarge(f"the body has more than {MAX_PARTS} strings, objects and lists; send fewer")


def _num_parts(quoted: bytes, unquoted: bytes) -> int:
    return quoted.count(b'"') // 2 + unquoted.count(b"{") + unquoted.count(b"[")


def _without_no_effect(values: dict[str, Any]) -> dict[str, Any]:
    kept = {}
    for name, value in values.items():
        accepted = NO_EFFECT.get(name)
        if accepted is None or value is None:
            kept[name] = value
        elif not any(value == idle and type(value) is type(idle) for idle in accepted):
            raise InvalidParameter(f"{name} is not supported with this value", param=name)
    return {name: value for name, value in kept.items() if value is not None}


def _translated(error: ValidationError) -> InvalidParameter:
    first = error.errors(include_url=False, include_input=False)[0]
    where = first["loc"]
    if first["type"] == UNKNOWN_NAME and "ctx" in first:
        where = (*where, first["ctx"]["name"])
    param = str(where[0])[:64] if where else None
    if first["type"] == "missing":
        return InvalidParameter(f"{_path(where)} is missing", param=param)
    if first["type"] == UNKNOWN_NAME:
        return InvalidParameter(f"{_path(where)[:64]} is not a parameter that is supported here", param=param)
    return InvalidParameter(f"{_path(where)}: {first['msg'][:1].lower()}{first['msg'][1:]}", param=param)


def _path(where: tuple[int | str, ...]) -> str:
    """`messages[0].role` from ("messages", 0, "role"); pydantic's names of union branches are left out."""
    path = ""
    for step in where:
        if isinstance(step, int):
            path += f"[{step}]"
        elif step.isidentifier() and step not in ("str", "int"):
            path += f".{step}" if path else step
    return path or "the body"


def check_request(body: GenerationBody) -> None:
    """What one field alone cannot tell. Raises InvalidParameter."""
    if body.stream_options is not None and not body.stream:
        raise InvalidParameter("stream_options is only allowed with stream: true", param="stream_options")
    if None not in (body.max_tokens, body.max_completion_tokens) and (
        body.max_tokens != body.max_completion_tokens
    ):
        raise InvalidParameter("max_tokens and max_completion_tokens differ; send one", param="max_tokens")
    if body.structured_outputs is not None and body.has_format:
        raise InvalidParameter(
            "structured_outputs and response_format both say what the answer looks like; send one",
            param="structured_outputs",
        )
    limit = body.limit if body.limit is not None else body.default_limit
    if limit is not None and body.min_tokens > limit:
        raise InvalidParameter(f"min_tokens exceeds the limit of {limit} tokens", param="min_tokens")
    if body.n * body.num_prompts > schemas.MAX_SEQUENCES:
        raise InvalidParameter(f"prompts times n may be at most {schemas.MAX_SEQUENCES}", param="n")
    if isinstance(body, schemas.ChatBody) and body.top_logprobs is not None and not body.logprobs:
        raise InvalidParameter("top_logprobs needs logprobs: true", param="top_logprobs")


def check_token_ids(ids: Iterable[int], vocab_size: int, param: str) -> None:
    """Every id is one of the model's. Raises InvalidParameter naming the range."""
    if any(not 0 <= token_id < vocab_size for token_id in ids):
        raise InvalidParameter(f"{param}: token ids are from 0 to {vocab_size - 1}", param=param)
