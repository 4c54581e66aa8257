"""Bodies that are legal in size and made to take long: turned down at the first thing that is wrong."""

from __future__ import annotations

import time

import orjson
import pytest

from core.errors import BatonError, InvalidParameter, PayloadTooLarge
from services.router.parse import MAX_PARTS, check_num_parts, parse
from services.router.schemas import ChatBody, CompletionBody, DetokenizeBody, JsonSchema, Message

MANY = 1_000_000
NAMES = {f"k{i}": 1 for i in range(MAX_PARTS - 10)}
TURN = {"role": "user", "content": "a"}


def repeated(before: str, each: str, after: str, times: int = MANY) -> bytes:
    return (before + ",".join([each] * times) + after).encode()


@pytest.mark.parametrize(
    ("kind", "body", "error", "param"),
    [
        (CompletionBody, orjson.dumps({"prompt": "a", **NAMES}), InvalidParameter, "k0"),
        (
            CompletionBody,
            orjson.dumps({"prompt": "a", "stream_options": NAMES}),
            InvalidParameter,
            "stream_options",
        ),
        (ChatBody, orjson.dumps({"messages": [TURN | NAMES]}), InvalidParameter, "messages"),
        (CompletionBody, orjson.dumps({"prompt": "a", "logit_bias": NAMES}), InvalidParameter, "logit_bias"),
        (CompletionBody, repeated('{"prompt": [', "1.5", "]}"), InvalidParameter, "prompt"),
        (CompletionBody, repeated('{"prompt": [', "[1]", "]}", MAX_PARTS - 9), InvalidParameter, "prompt"),
        (CompletionBody, repeated('{"prompt": "a", "stop": [', "1", "]}"), InvalidParameter, "stop"),
        (ChatBody, repeated('{"messages": [', "1", "]}"), InvalidParameter, "messages"),
        (ChatBody, repeated('{"messages": [', '{"role": "x"}', "]}", 40_000), InvalidParameter, "messages"),
        (
            ChatBody,
            repeated('{"messages": [{"role": "user", "content": [', "1", "]}]}"),
            InvalidParameter,
            "messages",
        ),
        (DetokenizeBody, repeated('{"tokens": [', "1.5", "]}"), InvalidParameter, "tokens"),
        (ChatBody, orjson.dumps({"messages": [TURN] * 220_000}), PayloadTooLarge, None),
        (CompletionBody, repeated('{"prompt": [', "[]", "]}"), PayloadTooLarge, None),
        (CompletionBody, repeated('{"prompt": [', '""', "]}"), PayloadTooLarge, None),
        (CompletionBody, orjson.dumps({f"k{i}": 1 for i in range(MAX_PARTS)}), PayloadTooLarge, None),
    ],
)
def test_what_would_take_seconds_is_refused_soon(kind, body, error: type[BatonError], param) -> None:
    """A list of all that is wrong took 2 to 10 s of one core; the bound is far above what it takes now, about
    0.1 s."""
    began = time.thread_time()
    with pytest.raises(error) as caught:
        parse(body, kind)
    assert time.thread_time() - began < 1.5
    assert caught.value.param == param
    assert len(caught.value.message) < 200


def test_what_is_large_and_right_is_read() -> None:
    assert len(parse(repeated('{"prompt": [', "504", "]}"), CompletionBody).prompt[0]) == MANY
    assert len(parse(repeated('{"tokens": [', "504", "]}"), DetokenizeBody).tokens) == MANY
    turns = parse(orjson.dumps({"messages": [TURN] * 20_000}), ChatBody).messages
    assert turns == [Message(role="user", content="a")] * 20_000
    metadata = parse(orjson.dumps({"prompt": "a", "metadata": NAMES}), CompletionBody).metadata
    assert metadata == NAMES


@pytest.mark.parametrize("text", ['{"a": [1]}, ', '\\" ', "\\", '\\\\"[{', "[", "{", '"', "'"])
def test_what_stands_in_strings_is_no_part(text: str) -> None:
    check_num_parts(orjson.dumps({"prompt": text * (2 * MAX_PARTS)}))
    at_most = [[text]] * ((MAX_PARTS - 2) // 2)
    check_num_parts(orjson.dumps({"prompt": at_most}).replace(b'"prompt"', b"0"))
    with pytest.raises(PayloadTooLarge, match="131072 strings, objects and lists"):
        check_num_parts(orjson.dumps({"prompt": at_most}))


@pytest.mark.parametrize("kind", [CompletionBody, JsonSchema, Message])
def test_names_are_those_that_clients_write(kind) -> None:
    assert kind.names == kind.model_json_schema()["properties"].keys()


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({"prompt": "a", "frobnicate": 1}, "frobnicate is not a parameter"),
        ({"prompt": "a", "stream": True, "stream_options": {"x": 1}}, "stream_options.x is not a parameter"),
        (
            {"prompt": "a", "logit_bias": {str(i): 1 for i in range(1025)}},
            "logit_bias: should have at most 1024",
        ),
        ({"prompt": ["a"] * 129}, "prompt: should have at most 128 prompts"),
    ],
)
def test_the_sentence_says_where(body: dict[str, object], words: str) -> None:
    with pytest.raises(InvalidParameter, match=words):
        parse(orjson.dumps(body), CompletionBody)
