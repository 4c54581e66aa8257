"""Streams of characters over several tokens (pain A3)."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from checkpoint.detokenize import Detokenizer

TEXTS = [
    "今天天气很好，我们",
    "한국어 삼겹살",
    "🍎🍌🍇",
    "👨‍👩‍👧 family",
    "Ω naïve café",
    "a\u0301 – “x”\r\n",
]


def stream(tokenizer, ids, skip_special=True) -> list[str]:
    detokenizer = Detokenizer(tokenizer, skip_special)
    pieces = [detokenizer.push(token_id) for token_id in ids]
    return [*pieces, detokenizer.finish()]


@pytest.mark.parametrize("text", TEXTS)
def test_only_complete_characters_are_sent(tokenizer, text):
    ids = tokenizer.encode(text)
    pieces = stream(tokenizer, ids)
    assert "".join(pieces) == text
    assert pieces[-1] == ""


@pytest.mark.parametrize("text", TEXTS)
def test_a_cut_inside_a_character_equals_the_one_shot_decode(tokenizer, text):
    ids = tokenizer.encode(text)
    for length in range(len(ids) + 1):
        assert "".join(stream(tokenizer, ids[:length])) == tokenizer.decode(ids[:length])


def test_an_emoji_comes_with_its_last_token(tokenizer):
    ids = tokenizer.encode("🍎")
    assert len(ids) == 3
    assert stream(tokenizer, ids) == ["", "", "🍎", ""]
    assert stream(tokenizer, ids[:2]) == ["", "", "\ufffd"]


@settings(max_examples=200, deadline=None)
@given(ids=st.lists(st.one_of(st.integers(0, 300), st.integers(0, 49151))), skip_special=st.booleans())
def test_any_ids_stream_to_their_one_shot_decode(tokenizer, ids, skip_special):
    assert "".join(stream(tokenizer, ids, skip_special)) == tokenizer.decode(ids, skip_special)


def test_a_detokenizer_is_fresh_after_finish(tokenizer):
    detokenizer = Detokenizer(tokenizer)
    half, *_ = tokenizer.encode("🍎")
    detokenizer.push(half)
    assert detokenizer.finish() == "\ufffd"
    assert detokenizer.push(tokenizer.encode("a")[0]) == "a"
