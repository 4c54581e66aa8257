"""Stop strings, pieces of text and log probabilities, token by token (pains A2, A3)."""

from __future__ import annotations

import random

import pytest
from router_fakes import EOS, logprob, says

from core.request import FinishReason, TokenDelta
from services.router.choice import Choice, Piece
from services.router.logprobs import completion_logprobs
from services.router.stops import StopMatcher

ALPHABET = "ABCDEFGHIJKLMNOP"


def released(stops, parts, **options):
    matcher = StopMatcher(stops)
    out = [matcher.push(part, **options) for part in parts]
    return out, matcher


@pytest.mark.parametrize(
    ("stops", "parts", "expected"),
    [
        (["DEFGHIJ"], ["ABC", "DEF", "GH", "I", "J", "K"], ["ABC", "", "", "", "", ""]),
        (["DEFGHIJ"], ["ABC", "DEF", "GH", "X"], ["ABC", "", "", "DEFGHX"]),
        (["END"], ["xEN", "EN", "D"], ["x", "EN", ""]),
        (["\nUser:", "\nUse it"], ["a\nUse", " me", "\nUser", ":"], ["a", "\nUse me", "", ""]),
        (["abcd", "c"], ["a", "b", "cd"], ["", "", "ab"]),
        (["abcd", "c"], ["abcd"], ["ab"]),
        (["bc", "abc"], ["abc"], [""]),
        (["aab"], ["a", "a", "a", "b"], ["", "", "a", ""]),
        ([], ["a", "b"], ["a", "b"]),
    ],
)
def test_matcher_holds_back_and_cuts(stops, parts, expected):
    out, _ = released(stops, parts)
    assert out == expected


def test_matcher_does_not_depend_on_how_text_is_cut():
    rng = random.Random(1)
    for _ in range(500):
        text = "".join(rng.choice("ab\n") for _ in range(30))
        stops = ["".join(rng.choice("ab\n") for _ in range(rng.randint(1, 5))) for _ in range(3)]
        outcomes = set()
        for _ in range(4):
            cuts = sorted(rng.sample(range(31), 6))
            parts = [text[i:j] for i, j in zip([0, *cuts], [*cuts, 30], strict=True)]
            out, matcher = released(stops, parts)
            outcomes.add(("".join(out) + matcher.flush(), matcher.stopped))
        assert len(outcomes) == 1
        [(kept, stopped)] = outcomes
        assert text.startswith(kept)
        assert not any(stop in kept for stop in stops)
        assert stopped == any(stop in text for stop in stops)


def test_flush_gives_the_held_tail():
    out, matcher = released(["DEFGHIJ"], ["ABC", "DEF"])
    assert out == ["ABC", ""]
    assert matcher.flush() == "DEF"
    assert not matcher.stopped


def test_a_match_before_the_minimum_is_text_one_that_completes_after_it_is_not():
    matcher = StopMatcher(["ab"])
    assert matcher.push("xab", may_stop=False) == "xab"
    assert matcher.push("ya", may_stop=False) == "y"
    assert matcher.push("b") == ""
    assert matcher.stopped


def feed(text, ids, *, stops=(), finish=FinishReason.STOP, min_tokens=0, k=None):
    """One id at a time; returns the pieces."""
    choice = Choice(0, text.tokenizer, stops, {EOS}, min_tokens)
    pieces = []
    for step, token_id in enumerate(ids):
        reason = finish if step == len(ids) - 1 else None
        lps = () if k is None else (logprob(token_id, k),)
        pieces.append(choice.feed(TokenDelta("r", 0, (token_id,), lps, reason)))
        if choice.finished:
            break
    return choice, pieces


def merged(pieces) -> Piece:
    whole = Piece(0)
    for piece in pieces:
        whole.append(piece)
    return whole


def test_alphabet_stop_over_token_borders(text):
    ids = text.tokenizer.encode(ALPHABET)
    choice, pieces = feed(text, ids, stops=["DEFGHIJ"], k=1)
    whole = merged(pieces)
    assert whole.text == "ABC"
    assert whole.finish_reason == "stop"
    assert choice.finished
    assert whole.token_ids == ids[: choice.num_tokens]
    kept = [token.token_id for token in whole.scored]
    assert text.tokenizer.decode(kept).startswith("ABC")
    assert text.tokenizer.decode(kept[:-1]) < "ABC"


def test_held_text_and_its_logprobs_come_out_when_the_answer_ends(text):
    ids = text.tokenizer.encode("ABCDEF")
    for finish, last in ((FinishReason.LENGTH, []), (FinishReason.STOP, [EOS])):
        _, pieces = feed(text, [*ids, *last], stops=["DEFGHIJ"], finish=finish, k=0)
        whole = merged(pieces)
        assert whole.text == "ABCDEF"
        assert whole.finish_reason == finish.value
        assert whole.token_ids == [*ids, *last] == [token.token_id for token in whole.scored]


def test_logprobs_and_ids_never_run_ahead_of_text(text):
    ids = text.tokenizer.encode("ABCDEFG hello")
    _, pieces = feed(text, ids, stops=["DEFGHIJ"], finish=FinishReason.LENGTH, k=0)
    sent = ""
    for piece in pieces:
        sent += piece.text
        assert len(piece.scored) == len(piece.token_ids)
        assert all(token.offset < len(sent) for token in piece.scored)


@pytest.mark.parametrize("word", ["🦊", "한", "삼겹살", "👨‍👩‍👧‍👦", "Ω", "na\u0308ive"])
def test_split_characters_fed_singly(text, word):
    ids = text.tokenizer.encode(word * 3)
    _, pieces = feed(text, ids, finish=FinishReason.LENGTH)
    assert merged(pieces).text == word * 3
    assert not any("\ufffd" in piece.text for piece in pieces)


def test_a_character_cut_by_the_limit_is_one_replacement(text):
    ids = text.tokenizer.encode("🦊")
    assert len(ids) > 1
    _, pieces = feed(text, ids[:-1], finish=FinishReason.LENGTH)
    assert merged(pieces).text == "\ufffd"


def test_stop_that_begins_with_a_split_character_drops_its_byte_tokens(text):
    ids = text.tokenizer.encode("hey🦊!")
    _, pieces = feed(text, ids, stops=["🦊!"], k=0)
    whole = merged(pieces)
    assert whole.text == "hey"
    assert text.tokenizer.decode([t.token_id for t in whole.scored]) == "hey"


def test_min_tokens_lets_an_early_stop_string_pass(text):
    ids = text.tokenizer.encode("one stop two stop three")
    _, pieces = feed(text, ids, stops=["stop"], min_tokens=3)
    assert merged(pieces).text == "one stop two "


def test_completion_logprobs_are_parallel_and_name_bytes(text):
    ids = text.tokenizer.encode("hi🦊")
    _, pieces = feed(text, ids, finish=FinishReason.LENGTH, k=2)
    shape = completion_logprobs(text.tokenizer, merged(pieces).scored)
    assert {len(column) for column in shape.values()} == {len(ids)}
    assert shape["tokens"][0] == "hi"
    assert all(name.startswith("bytes:\\x") for name in shape["tokens"][1:])
    assert shape["text_offset"] == [0] + [2] * (len(ids) - 1)


async def test_stop_strings_through_the_router(stack_of, text):
    ids = text.tokenizer.encode(ALPHABET * 50)
    async with stack_of(says(ids, delay_s=0.001)) as stack:
        ask = {"model": stack.model, "prompt": "x", "stop": ["FGHI", "GH"], "max_tokens": 500, "n": 2}
        whole = await stack.client.completions.create(**ask, logprobs=1)
        assert [c.text for c in whole.choices] == ["ABCDEF", "ABCDEF"]
        assert {c.finish_reason for c in whole.choices} == {"stop"}
        await stack.until(lambda: not stack.worker.open)
        request_id = stack.worker.starts[0].request_id
        assert stack.worker.cancels == [(request_id, 0), (request_id, None)]
        stream = await stack.client.completions.create(**ask, stream=True)
        events = [e async for e in stream]
        assert "".join(c.text for e in events for c in e.choices if c.index == 0) == "ABCDEF"
        tokens = whole.choices[0].logprobs
        assert "".join(tokens.tokens[:-1]) < "ABCDEF"
        assert len(tokens.tokens) == len(tokens.token_logprobs) == len(tokens.text_offset)


async def test_chat_logprobs(stack_of, text):
    ids = text.tokenizer.encode("hi there")
    async with stack_of(says(ids)) as stack:
        ask = {"model": stack.model, "messages": [{"role": "user", "content": "x"}], "logprobs": True}
        answer = await stack.client.chat.completions.create(**ask, top_logprobs=2)
        content = answer.choices[0].logprobs.content
        assert [entry.token for entry in content] == ["hi", " there", "<|im_end|>"]
        assert content[1].bytes == list(b" there")
        assert len(content[0].top_logprobs) == 2
        events = [e async for e in await stack.client.chat.completions.create(**ask, stream=True)]
        streamed = [x.token for e in events for c in e.choices if c.logprobs for x in c.logprobs.content]
        assert streamed == ["hi", " there", "<|im_end|>"]
        assert stack.worker.starts[1].sampling.logprobs == 0


@pytest.mark.parametrize("stream", [False, True])
async def test_echo_with_and_without_logprobs(stack_of, text, stream):
    prompt = "Say 🦊 twice:"
    prompt_ids = text.tokenizer.encode(prompt)
    async with stack_of(says(text.tokenizer.encode(" ok")), prefill=1) as stack:

        async def ask(**options):
            answer = await stack.client.completions.create(
                model=stack.model, echo=True, stream=stream, max_tokens=5, **options
            )
            choices = [c async for e in answer for c in e.choices] if stream else answer.choices
            return choices, "".join(c.text for c in choices)

        choices, said = await ask(prompt=prompt)
        assert said == prompt + " ok"
        assert not stack.worker.starts[0].sampling.prompt_logprobs
        choices, said = await ask(prompt=prompt_ids)
        assert said == prompt + " ok"
        choices, said = await ask(prompt=prompt, logprobs=2)
        assert said == prompt + " ok"
        sent = stack.worker.starts[2]
        assert sent.sampling.prompt_logprobs
        assert sent.prefill is None
        merge = lambda name: [x for c in choices if c.logprobs for x in getattr(c.logprobs, name)]  # noqa: E731
        assert len(merge("tokens")) == len(prompt_ids) + 2
        assert merge("token_logprobs")[0] is None
        assert merge("top_logprobs")[0] is None
        offsets = merge("text_offset")
        assert offsets == sorted(offsets)
        assert offsets[len(prompt_ids)] == len(prompt)
        assert offsets[-1] == len(prompt + " ok")
