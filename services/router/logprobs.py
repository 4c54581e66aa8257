"""Log probabilities in OpenAI's two shapes: parallel lists for completions, objects for chat."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from checkpoint.detokenize import Detokenizer
from checkpoint.tokenizer import Tokenizer
from core.request import TokenLogprob
from services.router.choice import Token

LOWEST = -9999.0
"""Stands for minus infinity, which JSON cannot say."""


def completion_logprobs(tokenizer: Tokenizer, tokens: Sequence[Token], base: int = 0) -> dict[str, Any]:
    """`tokens`, `token_logprobs`, `top_logprobs`, `text_offset`, one entry a token.

    `base` is added to every offset: the length of the text before the choice's own (an echo).
    The first token of an echoed prompt has no log probability; its entries are null.
    """
    return {
        "tokens": [_name(tokenizer.token_bytes(token.token_id)) for token in tokens],
        "token_logprobs": [None if t.logprob is None else _finite(t.logprob.logprob) for t in tokens],
        "top_logprobs": [None if t.logprob is None else _by_name(tokenizer, t.logprob) for t in tokens],
        "text_offset": [base + token.offset for token in tokens],
    }


def chat_logprobs(tokenizer: Tokenizer, tokens: Iterable[Token]) -> dict[str, Any]:
    """`content`: one object a token, each with its bytes and the best alternatives."""
    content = []
    for token in tokens:
        if token.logprob is not None:
            entry = _entry(tokenizer, token.token_id, token.logprob.logprob)
            entry["top_logprobs"] = [_entry(tokenizer, *best) for best in token.logprob.top]
            content.append(entry)
    return {"content": content, "refusal": None}


def prompt_tokens(
    tokenizer: Tokenizer, token_ids: Sequence[int], logprobs: Sequence[TokenLogprob | None], num_chars: int
) -> list[Token]:
    """The tokens of an echoed prompt of `num_chars` characters, with their offsets in it."""
    detokenizer, offset, tokens = Detokenizer(tokenizer, skip_special=False), 0, []
    for token_id, logprob in zip(token_ids, logprobs, strict=True):
        tokens.append(Token(token_id, min(offset, num_chars), logprob))
        offset += len(detokenizer.push(token_id))
    return tokens


def _name(raw: bytes) -> str:
    """A token as text; one that is no complete character as OpenAI's `bytes:\\xf0\\x9f`."""
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)


def _by_name(tokenizer: Tokenizer, logprob: TokenLogprob) -> dict[str, float]:
    pairs = [*logprob.top, (logprob.token_id, logprob.logprob)]
    return {_name(tokenizer.token_bytes(token_id)): _finite(value) for token_id, value in pairs}


def _entry(tokenizer: Tokenizer, token_id: int, logprob: float) -> dict[str, Any]:
    raw = tokenizer.token_bytes(token_id)
    return {"token": raw.decode(errors="replace"), "logprob": _finite(logprob), "bytes": list(raw)}


def _finite(value: float) -> float:
    return max(value, LOWEST)
