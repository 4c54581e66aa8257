"""Sentencepiece BPE from GGUF metadata (`tokenizer.ggml.model = llama`: Llama 2, Mistral 0.x)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import tokenizers
from tokenizers import models, normalizers

from core.errors import ConfigError

_NORMAL = 1  # value of tokenizer.ggml.token_type
_NOT_LLAMA = ("precompiled_charsmap", "remove_extra_whitespaces")


def sentencepiece_from_gguf(metadata: Mapping[str, Any], path: object) -> tokenizers.Tokenizer:
    """The tokenizer without its special tokens. Raises ConfigError for what Llama's do not have."""
    tokens: list[str] = metadata["tokenizer.ggml.tokens"]
    scores = metadata.get("tokenizer.ggml.scores", [])
    types = metadata.get("tokenizer.ggml.token_type", [])
    for key in _NOT_LLAMA:
        if metadata.get(f"tokenizer.ggml.{key}"):
            raise ConfigError(
                f"{path} has a sentencepiece tokenizer with {key}, which is not supported; "
                f"use the Hugging Face directory of this model"
            )
    if not len(tokens) == len(scores) == len(types) or len(set(tokens)) != len(tokens):
        raise ConfigError(
            f"{path} does not give each of its {len(tokens)} tokens one score, one type and one meaning; "
            f"convert the model again"
        )
    unknown = metadata.get("tokenizer.ggml.unknown_token_id", 0)
    normal = {i for i, kind in enumerate(types) if kind == _NORMAL}
    core = tokenizers.Tokenizer(
        models.BPE(
            {token: token_id for token_id, token in enumerate(tokens)},
            merges_of(tokens, scores, normal),
            unk_token=tokens[unknown],
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    spaces = normalizers.Replace(" ", "▁")
    prefixed = metadata.get("tokenizer.ggml.add_space_prefix", True)
    core.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), spaces]) if prefixed else spaces
    return core


def merges_of(tokens: Sequence[str], scores: Sequence[float], normal: set[int]) -> list[tuple[str, str]]:
    """Merge rules, first to last, that choose as sentencepiece does.

    Sentencepiece joins the neighbours whose union is the piece of the highest score; BPE joins those
    whose rule comes first. So every way to make a piece of two is a rule, in the order of the pieces'
    scores. Only the pieces with an id in `normal` take part.
    """
    ids = {tokens[i]: i for i in normal}
    order = sorted(normal, key=lambda i: -scores[i])
    return [pair for i in order for pair in _halves(tokens[i], ids)]


def _halves(piece: str, known: Mapping[str, int]) -> Iterator[tuple[str, str]]:
    for cut in range(1, len(piece)):
        if piece[:cut] in known and piece[cut:] in known:
            yield piece[:cut], piece[cut:]
