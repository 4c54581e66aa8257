"""Grammars in the engine: the real matcher over the embedded model's tokens, and a fake one in steps.

Pain A10: an answer under a grammar has one finish; JSON cannot spin on whitespace.
"""

from __future__ import annotations

import itertools
import json
import random

import pytest
import torch
from fake_matcher import Ascending
from hash_model import VOCAB, Harness, random_prompt
from llguidance import LLMatcher

from checkpoint.open import open_checkpoint
from core.errors import InvalidParameter
from core.request import Grammar, Request, SamplingParams
from engine import grammar as engine_grammar
from engine.grammar import GrammarCompiler, GrammarMatcher
from engine.messages import Add

EOS = 2
SCHEMA = {
    "type": "object",
    "properties": {"n": {"type": "integer"}, "on": {"type": "boolean"}},
    "required": ["n", "on"],
    "additionalProperties": False,
}
COMPACT = {"whitespace_flexible": False, "item_separator": ", ?", "key_separator": ": ?"}


def of_schema(schema: object) -> str:
    return LLMatcher.grammar_from_json_schema(json.dumps(schema), overrides=COMPACT)  # type: ignore[arg-type]


def of_regex(regex: str) -> str:
    return LLMatcher.grammar_from_regex(regex)


@pytest.fixture(scope="module")
def model():
    return open_checkpoint("")


@pytest.fixture(scope="module")
def tokenizer(model):
    return model.load_tokenizer()


@pytest.fixture(scope="module")
def compiler(model, tokenizer) -> GrammarCompiler:
    return GrammarCompiler(lambda: tokenizer, model.config.vocab_size, model.config.eos_token_ids)


def params(text: str, *, ignore_eos: bool = False) -> SamplingParams:
    stops = frozenset() if ignore_eos else frozenset({EOS})
    return SamplingParams(max_tokens=9, seed=0, stop_token_ids=stops, grammar=Grammar(text, "format.x"))


def accepts(matcher: GrammarMatcher, tokenizer, text: str) -> bool:
    """Whether every token of `text` is allowed in its turn; the matcher follows it."""
    for token_id in tokenizer.encode(text):
        if not matcher.allowed()[token_id]:
            return False
        matcher.advance([token_id])
    return not matcher.error


# ---- the real matcher


@pytest.mark.parametrize(
    ("text", "good", "bad"),
    [
        (
            of_schema(SCHEMA),
            ['{"n":1,"on":true}', '{"n": -20, "on": false}'],
            ['{"n":1.5', '{"n":  1', "{\n"],
        ),
        (of_regex("[a-c]{2}-?[0-9]"), ["ab-3", "cc7"], ["ad", "ab--"]),
        (LLMatcher.grammar_from_lark('start: "yes" | "nope"'), ["yes", "nope"], ["no!", "y "]),
        (LLMatcher.grammar_from_lark('start: e\ne: "(" e ")" | "x"'), ["((x))"], ["(x))", "()"]),
    ],
)
def test_only_what_matches_can_be_said(compiler, tokenizer, text: str, good: list[str], bad: list[str]):
    for answer in good:
        matcher = compiler.compile(params(text))
        assert accepts(matcher, tokenizer, answer), answer
        assert matcher.finished
        assert not matcher.error
    for answer in bad:
        assert not accepts(compiler.compile(params(text)), tokenizer, answer), answer


def test_an_end_token_is_allowed_only_where_the_text_is_complete(compiler, tokenizer) -> None:
    matcher = compiler.compile(params(of_regex("ab+")))
    assert not matcher.allowed()[EOS]
    assert accepts(matcher, tokenizer, "ab")
    assert matcher.allowed()[EOS]
    assert not matcher.finished, "another b may follow"
    matcher.advance([EOS])
    assert matcher.finished


def test_ignored_end_tokens_are_barred_while_anything_else_may_follow(compiler, tokenizer) -> None:
    matcher = compiler.compile(params(of_regex("ab+"), ignore_eos=True))
    assert accepts(matcher, tokenizer, "ab")
    assert not matcher.allowed()[EOS]
    nothing = compiler.compile(params(of_regex(""), ignore_eos=True))
    assert torch.nonzero(nothing.allowed()).flatten().tolist() == sorted(compiler._eos_token_ids)


def test_random_walks_parse(compiler, tokenizer) -> None:
    """Whatever is drawn among the allowed tokens, a finished answer is JSON of the schema."""
    schema = {
        "type": "object",
        "properties": {"a": {"type": "array", "items": {"enum": ["x", 1, None]}, "maxItems": 3}},
        "required": ["a"],
        "additionalProperties": False,
    }
    for seed in range(30):
        matcher, rng, output = compiler.compile(params(of_schema(schema))), random.Random(seed), []
        while not matcher.finished:
            output.append(rng.choice(torch.nonzero(matcher.allowed()).flatten().tolist()))
            matcher.advance(output[-1:])
            assert not matcher.error
        assert set(json.loads(tokenizer.decode(output))) == {"a"}


def test_a_fork_goes_its_own_way(compiler, tokenizer) -> None:
    matcher = compiler.compile(params(of_regex("ab|ac")))
    assert accepts(matcher, tokenizer, "a")
    twin = matcher.fork()
    assert accepts(matcher, tokenizer, "b")
    assert twin.num_seen == 1
    assert not twin.finished
    assert accepts(twin, tokenizer, "c")


def test_the_state_is_a_function_of_the_output(compiler, tokenizer) -> None:
    """Told all at once or token by token, by any cut: the same tokens may follow."""
    output = tokenizer.encode('{"n":12,"on":')
    stepped = compiler.compile(params(of_schema(SCHEMA)))
    for at, token_id in enumerate(output):
        rebuilt = compiler.compile(params(of_schema(SCHEMA)))
        rebuilt.advance(output[:at])
        assert torch.equal(stepped.allowed(), rebuilt.allowed())
        stepped.advance([token_id])
    assert stepped.num_seen == len(output)


def test_a_token_outside_the_grammar_breaks_the_matcher_for_good(compiler, tokenizer) -> None:
    matcher = compiler.compile(params(of_regex("abc")))
    matcher.advance(tokenizer.encode("z"))
    assert matcher.error
    assert not matcher.finished
    assert matcher.allowed().any()


@pytest.mark.parametrize(
    ("text", "word"),
    [
        (of_regex("(("), "unclosed group"),
        (of_schema({"type": "nope"}), "nope"),
        (of_schema({"type": "array", "uniqueItems": True}), "uniqueItems"),
        (LLMatcher.grammar_from_lark("start: <[999999]>"), "999999"),
        ("nonsense", "Expected"),
        (of_regex("a" * 140_000), "too large"),
    ],
)
def test_what_is_no_grammar_is_refused_by_name(compiler, text: str, word: str) -> None:
    with pytest.raises(InvalidParameter) as caught:
        compiler.compile(params(text))
    assert caught.value.param == "format"
    assert "format.x" in caught.value.message
    assert word in caught.value.message


def test_compiled_grammars_are_kept_within_a_bound(compiler) -> None:
    texts = [of_regex(f"a{{{n}}}") for n in range(engine_grammar.MAX_COMPILED + 1)]
    for text in texts:
        compiler.compile(params(text))
        compiler.compile(params(texts[0]))  # in use all the time
    assert compiler.cached(params(texts[0])) is not None
    assert compiler.cached(params(texts[1])) is None
    assert compiler.cached(params(texts[2])) is not None


def test_matchers_of_one_grammar_do_not_touch(compiler, tokenizer) -> None:
    first, second = (compiler.compile(params(of_regex("ab"))) for _ in range(2))
    assert accepts(first, tokenizer, "ab")
    assert accepts(second, tokenizer, "ab")


# ---- the engine's steps


def add(h: Harness, name: str, first: int, last: int, *, breaks_at: int = 10**6, **given: object) -> None:
    plain = {"max_tokens": 60, "seed": 3, "temperature": 1.0, "grammar": Grammar("", "format.x")}
    sampling = SamplingParams(**plain | given)  # type: ignore[arg-type]
    matcher, prompt = Ascending(VOCAB, first, last, breaks_at), random_prompt(12)
    h.prompt_lens[name] = len(prompt)
    h.engine.handle(Add(Request(name, tuple(prompt), sampling), matcher=matcher))


def ascends(tokens: list[int], first: int, last: int) -> bool:
    steps = [b - a for a, b in zip([first - 1, *tokens], tokens, strict=False)]
    return tokens[-1] == last and set(steps) <= {1, 2}


def test_where_only_the_end_can_follow_the_choice_stops(harness) -> None:
    h = harness()
    add(h, "r", 10, 30)
    h.run()
    assert ascends(h.tokens("r"), 10, 30)
    assert h.finish("r") == ["stop"], "and without an end token"


@pytest.mark.parametrize(
    ("given", "finish"),
    [
        ({"max_tokens": 3}, "length"),
        ({"min_tokens": 40}, "stop"),
        ({"repetition_penalty": 1.3, "frequency_penalty": 1.0, "presence_penalty": 1.0}, "stop"),
        ({"temperature": 0.0, "logprobs": 2}, "stop"),
        ({"logit_bias": ((0, 100.0),)}, "stop"),
        ({"bad_words": ((12,), (13, 14))}, "stop"),
        ({"allowed_token_ids": (1, 2)}, "stop"),
        ({"top_k": 5, "top_p": 0.9, "min_p": 0.1}, "stop"),
    ],
)
def test_the_grammar_holds_beside_everything_else(harness, given: dict[str, object], finish: str) -> None:
    h = harness()
    add(h, "r", 10, 30, **given)
    h.run()
    assert h.finish("r") == [finish]
    assert finish == "length" or ascends(h.tokens("r"), 10, 30)
    if "bad_words" in given:
        assert 12 not in h.tokens("r")
        assert (13, 14) not in itertools.pairwise(h.tokens("r"))


def test_a_stop_token_that_the_grammar_takes_ends_the_choice(harness) -> None:
    h = harness()
    add(h, "r", 10, 30, stop_token_ids=frozenset(range(20, 22)))
    h.run()
    assert h.tokens("r")[-1] in (20, 21)
    assert h.finish("r") == ["stop"]


def test_choices_fork_and_differ(harness) -> None:
    h = harness()
    add(h, "r", 10, 40, n=4)
    h.run()
    choices = [h.tokens("r", i) for i in range(4)]
    assert all(ascends(tokens, 10, 40) for tokens in choices)
    assert len(set(map(tuple, choices))) > 1
    assert h.finish("r") == ["stop"] * 4


def test_preempted_sequences_keep_their_place(harness) -> None:
    crowded, calm = harness(num_blocks=10, block_size=8), harness(num_blocks=64, block_size=8)
    for h in (crowded, calm):
        for name in ("a", "b"):
            add(h, name, 1, 75, seed=ord(name), max_tokens=68)
        h.run()
    assert crowded.scheduler.num_preempted > 0
    for name in ("a", "b"):
        assert crowded.tokens(name) == calm.tokens(name)
        assert ascends(crowded.tokens(name), 1, 75)


def test_a_broken_matcher_ends_its_request_alone(harness) -> None:
    h = harness()
    add(h, "broken", 10, 40, breaks_at=5, n=3)
    add(h, "sound", 10, 40)
    h.run()
    failed = h.failure("broken")
    assert failed is not None
    assert isinstance(failed.error, InvalidParameter)
    assert "after 4 tokens" in failed.error.message
    assert [len(h.tokens("broken", i)) for i in range(3)] == [4, 4, 4]
    assert h.finish("broken") == []
    assert ascends(h.tokens("sound"), 10, 40)
    assert h.engine.step_failures == 0
