"""Text, chat and ids agree with the reference answers (made by transformers)."""

from __future__ import annotations

from checkpoint.chat import encode_chat, render_chat
from checkpoint.detokenize import Detokenizer


def test_text_prompts_have_the_reference_ids(tokenizer, gold):
    cases = [case for case in gold if isinstance(case["source"], str)]
    assert len(cases) >= 8
    for case in cases:
        assert tokenizer.encode(case["source"]) == case["prompt_ids"], case["name"]
        assert tokenizer.decode(case["prompt_ids"]) == case["source"], case["name"]


def test_chats_have_the_reference_text_and_ids(tokenizer, gold):
    cases = [case for case in gold if isinstance(case["source"], dict)]
    assert len(cases) >= 6
    for case in cases:
        messages, rendered = case["source"]["messages"], case["source"]["rendered"]
        assert render_chat(tokenizer, messages) == rendered, case["name"]
        assert encode_chat(tokenizer, messages) == case["prompt_ids"], case["name"]
        assert tokenizer.encode(rendered, add_special=False) == case["prompt_ids"], case["name"]


def test_answers_detokenize_to_the_reference_text(tokenizer, gold):
    for case in gold:
        stream = Detokenizer(tokenizer, skip_special=False)
        pieces = [stream.push(token_id) for token_id in case["output_ids"]]
        assert "".join(pieces) + stream.finish() == case["output_text"], case["name"]
