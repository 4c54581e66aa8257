"""Constraints on the answer: what the workers are told, and what no worker may see (pain A10)."""

from __future__ import annotations

import json

import openai
import pytest
from llguidance import LLMatcher
from router_fakes import says

from core.errors import InvalidParameter
from services.router.schemas import MAX_STRUCTURE_CHARS

CHAT = {"messages": [{"role": "user", "content": "hi"}]}
TEXT = {"prompt": "hi"}
SCHEMA = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}
FORMAT = {"type": "json_schema", "json_schema": {"name": "answer", "schema": SCHEMA}}


def form(**changes: object) -> dict[str, object]:
    return {"response_format": {"type": "json_schema", "json_schema": FORMAT["json_schema"] | changes}}


def asks(**fields: object) -> dict[str, object]:
    return {"structured_outputs": fields}


def nested(depth: int) -> dict[str, object]:
    schema: dict[str, object] = {"type": "integer"}
    for _ in range(depth):
        schema = {"type": "array", "items": schema}
    return schema


BAD = [  # what is asked for, and a word that the message has
    ({"response_format": "json"}, "response_format"),
    ({"response_format": {}}, "response_format.type"),
    ({"response_format": {"type": "yaml"}}, "response_format.type"),
    ({"response_format": {"type": "json_object", "schema": SCHEMA}}, "response_format.schema"),
    ({"response_format": {"type": "json_object", "json_schema": FORMAT["json_schema"]}}, "json_schema"),
    ({"response_format": {"type": "json_schema"}}, "json_schema"),
    ({"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}}, "json_schema.schema"),
    ({"response_format": {"type": "json_schema", "json_schema": {"schema": SCHEMA}}}, "json_schema.name"),
    (form(name="a b"), "json_schema.name"),
    (form(name="a" * 65), "json_schema.name"),
    (form(strict="yes"), "json_schema.strict"),
    (form(frobnicate=1), "json_schema.frobnicate"),
    (form(schema=[]), "json_schema.schema"),
    (form(schema={"type": "nope"}), "nope"),
    (form(schema={"type": "array", "uniqueItems": True}), "uniqueItems"),
    (form(schema={"type": "string", "pattern": "("}), "unclosed group"),
    (form(schema={"$ref": "#/$defs/none"}), "none"),
    (form(schema={"enum": ["x" * 70_000]}), "too many"),
    (form(schema=nested(300)), "json_schema.schema"),
    (asks(), "exactly one"),
    (asks(regex=None), "exactly one"),
    (asks(regex="a", choice=["b"]), "exactly one"),
    (asks(regex="(("), "unclosed group"),
    (asks(regex="a(?=b)"), "look-around"),
    (asks(regex=""), "structured_outputs.regex"),
    (asks(regex=5), "structured_outputs.regex"),
    (asks(regex="a" * (MAX_STRUCTURE_CHARS + 1)), "structured_outputs.regex"),
    (asks(regex="(" * 8000 + ")" * 8000), "structured_outputs.regex"),
    (asks(choice=[]), "structured_outputs.choice"),
    (asks(choice=["a", ""]), "structured_outputs.choice[1]"),
    (asks(choice="a"), "structured_outputs.choice"),
    (asks(grammar="start: x"), '"x"'),
    (asks(grammar="root ::= x"), "'x'"),
    (asks(grammar="root ::= " + "(" * 4000), "structured_outputs.grammar"),
    (asks(grammar="start: " + "(" * 8000), "structured_outputs.grammar"),
    (asks(json={"type": "nope"}), "nope"),
    (asks(json='{"type": "object"}'), "structured_outputs.json"),
    (asks(json={"const": {"n": -(2**63)}}), "cannot read this"),
    (asks(json_object=False), "structured_outputs.json_object"),
    (asks(jason={}), "structured_outputs.jason"),
    (asks(regex="a") | {"response_format": {"type": "json_object"}}, "send one"),
    ({"allowed_token_ids": []}, "allowed_token_ids"),
    ({"allowed_token_ids": [1, 49152]}, "49151"),
    ({"allowed_token_ids": [-1]}, "allowed_token_ids"),
    ({"allowed_token_ids": ["1"]}, "allowed_token_ids[0]"),
    ({"bad_words": "x"}, "bad_words"),
    ({"bad_words": [""]}, "bad_words[0]"),
    ({"bad_words": ["x" * 257]}, "bad_words[0]"),
    ({"bad_words": ["x"] * 257}, "bad_words"),
]


async def test_every_bad_body_is_a_400_that_names_the_field_and_the_fault(stack_of):
    async with stack_of() as stack:
        for path, base in (("/v1/chat/completions", CHAT), ("/v1/completions", TEXT)):
            for extra, word in BAD:
                answer = await stack.http.post(path, json={**base, **extra})
                error = answer.json()["error"]
                assert answer.status_code == 400, extra
                assert (error["code"], error["type"]) == ("invalid_parameter", "invalid_request_error")
                assert error["param"] in extra
                assert error["param"] in error["message"]
                assert word in error["message"], error["message"]
                assert len(error["message"]) < 500
        assert stack.worker.starts == []


GOOD = [
    (FORMAT, None, '{"n": 5}', '{"n": "five"}'),
    ({"type": "json_object"}, None, '{"a":[1, 2]}', "[1]"),
    (None, {"regex": r"\d{2}"}, "42", "٤٢"),
    (None, {"regex": "a/b\n"}, "a/b\n", "a/b"),
    (None, {"choice": ["red", 'say "hi"\n', "größe 😀"]}, "größe 😀", "green"),
    (None, {"choice": ["red", 'say "hi"\n']}, 'say "hi"\n', "say"),
    (None, {"choice": [f"item {i} of many" for i in range(1024)]}, "item 1023 of many", "item"),
    (None, {"grammar": 'start: "a" start "b" | "ab"'}, "aaabbb", "aab"),
    (None, {"grammar": 'root ::= "a" | "b" root'}, "bba", "bb"),
    (None, {"json": SCHEMA}, '{"n":1}', '{"n":  1}'),
    (None, {"json_object": True}, "{}", "{ }"),
]


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
async def test_the_worker_gets_a_grammar_that_means_what_was_asked_for(stack_of, text, path: str):
    from engine.grammar import GrammarCompiler  # what a worker makes of it

    compiler = GrammarCompiler(lambda: text.tokenizer, text.vocab_size, text.eos_token_ids)
    base = CHAT if path.startswith("/v1/chat") else TEXT
    async with stack_of() as stack:
        for response_format, structured, good, bad in GOOD:
            extra = {"response_format": response_format, "structured_outputs": structured}
            answer = await stack.http.post(path, json={**base, **extra})
            assert answer.status_code == 200, answer.text
            sampling = stack.worker.starts[-1].sampling
            assert sampling.grammar.field in ("response_format", "structured_outputs")
            for said, whole in ((good, True), (bad, False)):
                matcher = compiler.compile(sampling)
                matcher.advance(text.tokenizer.encode(said))
                complete = not matcher.error and (
                    matcher.finished or bool(matcher.allowed()[min(text.eos_token_ids)])
                )
                assert complete is whole, (said, structured, matcher.error)


async def test_text_that_can_go_on_one_way_only_is_not_worked_out_in_advance(stack_of, text):
    """It would take a second of the engine's; so several tokens may begin it, not one canonical one."""
    from engine.grammar import GrammarCompiler

    compiler = GrammarCompiler(lambda: text.tokenizer, text.vocab_size, text.eos_token_ids)
    async with stack_of() as stack:
        for structured in (
            {"regex": "a{1000}{1000}"},
            {"grammar": '%llguidance {"no_forcing": false}\nstart: "a"~1000000'},
            {"json": {"const": "a" * 10_000}},
        ):
            answer = await stack.http.post("/v1/completions", json={**TEXT, "structured_outputs": structured})
            assert answer.status_code == 200, answer.text
            matcher = compiler.compile(stack.worker.starts[-1].sampling)
            matcher.advance(text.tokenizer.encode('"') if "json" in structured else [])
            assert int(matcher.allowed().sum()) > 1


async def test_without_constraints_the_worker_gets_none(stack_of):
    async with stack_of() as stack:
        idle = {"response_format": {"type": "text"}, "bad_words": [], "allowed_token_ids": None}
        for extra in ({}, idle, {"structured_outputs": None}):
            assert (await stack.http.post("/v1/chat/completions", json={**CHAT, **extra})).status_code == 200
            s = stack.worker.starts[-1].sampling
            assert (s.grammar, s.bad_words, s.allowed_token_ids) == (None, (), ())


async def test_words_become_token_ids_with_and_without_a_space(stack_of, text):
    async with stack_of() as stack:
        body = {**TEXT, "bad_words": ["Paris", " Paris", "supercalifragilistic", "<|im_end|>", " "]}
        assert (await stack.http.post("/v1/completions", json=body)).status_code == 200
        words = {text.tokenizer.decode(ids) for ids in stack.worker.starts[0].sampling.bad_words}
        long = ("supercalifragilistic", " supercalifragilistic", "<|im_end|>", " <|im_end|>")
        assert words == {"Paris", " Paris", *long, " ", "  "}
        assert all(2 not in ids for ids in stack.worker.starts[0].sampling.bad_words), "text, no end token"


async def test_allowed_token_ids_arrive(stack_of):
    async with stack_of() as stack:
        body = {**TEXT, "allowed_token_ids": [7, 49151, 7]}
        assert (await stack.http.post("/v1/completions", json=body)).status_code == 200
        assert stack.worker.starts[0].sampling.allowed_token_ids == (7, 49151)


async def test_a_grammar_that_only_a_worker_can_judge_is_the_same_400(stack_of):
    refusal = InvalidParameter("structured_outputs.grammar: no such token", param="structured_outputs")
    async with stack_of(says([5], fail_at=0, error=refusal)) as stack:
        extra = asks(grammar="start: <[99999999]>")
        with pytest.raises(openai.BadRequestError) as caught:
            await stack.client.completions.create(model=stack.model, **TEXT, extra_body=extra)
        assert (caught.value.param, caught.value.code) == ("structured_outputs", "invalid_parameter")
        assert "no such token" in caught.value.message


async def test_the_official_client_sends_a_schema(stack_of):
    async with stack_of() as stack:
        await stack.client.chat.completions.create(
            model=stack.model,
            messages=[{"role": "user", "content": "hi"}],
            response_format={
                "type": "json_schema",
                "json_schema": {"name": "n", "schema": SCHEMA, "strict": True},
            },
        )
        grammar = stack.worker.starts[0].sampling.grammar
        assert json.dumps(SCHEMA["properties"]).replace(" ", "") in grammar.text
        assert not LLMatcher.validate_grammar(grammar.text)
