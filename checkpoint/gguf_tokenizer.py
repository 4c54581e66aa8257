"""Tokenizer from GGUF metadata: byte-level BPE as the file's pre-tokenizer tag says, or sentencepiece."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import orjson
import tokenizers
from blake3 import blake3
from tokenizers import AddedToken, Regex, models, normalizers, pre_tokenizers, processors

from checkpoint.gguf_config import eos_token_ids
from checkpoint.gguf_sentencepiece import sentencepiece_from_gguf
from checkpoint.token_bytes import byte_level_bytes, sentencepiece_bytes
from checkpoint.tokenizer import SpecialTokens, Tokenizer
from core.errors import ConfigError

_UNKNOWN, _CONTROL, _USER_DEFINED = 2, 3, 4  # values of tokenizer.ggml.token_type
_NAMED = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}


def _words(max_digits: int) -> pre_tokenizers.PreTokenizer:
    """Contractions, words with one leading mark, up to `max_digits` digits, punctuation, whitespace."""
    digits = r"\p{N}" if max_digits == 1 else rf"\p{{N}}{{1,{max_digits}}}"
    pattern = (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
        r"|[^\r\n\p{L}\p{N}]?\p{L}+"
        rf"|{digits}"
        r"| ?[^\s\p{L}\p{N}]+[\r\n]*"
        r"|\s*[\r\n]+|\s+(?!\S)|\s+"
    )
    bytes_only = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    return pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(pattern), "isolated"), bytes_only])


def _gpt2() -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)


def _smollm() -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), _gpt2()])


_PRE_TOKENIZERS: dict[str, Callable[[], pre_tokenizers.PreTokenizer]] = {
    "gpt-2": _gpt2,
    "llama-bpe": lambda: _words(max_digits=3),
    "qwen2": lambda: _words(max_digits=1),
    "smollm": _smollm,
}


def tokenizer_from_gguf(metadata: Mapping[str, Any], path: object) -> Tokenizer:
    """Build the tokenizer. Raises ConfigError for a kind or pre-tokenizer that is not supported."""
    sentencepiece = _checked_kind(metadata, path) == "llama"
    core = sentencepiece_from_gguf(metadata, path) if sentencepiece else _byte_level_bpe(metadata, path)
    tokens: list[str] = metadata["tokenizer.ggml.tokens"]
    types = metadata.get("tokenizer.ggml.token_type", [])
    for token, token_type in zip(tokens, types, strict=False):
        if token_type == _CONTROL or (sentencepiece and token_type == _UNKNOWN):
            core.add_special_tokens([AddedToken(token, special=True, normalized=False)])
        elif token_type == _USER_DEFINED:
            core.add_tokens([AddedToken(token, special=False, normalized=False)])
    _surround(core, metadata, tokens)
    literals = {
        name: tokens[metadata[key]]
        for name, role in _NAMED.items()
        if (key := f"tokenizer.ggml.{role}_token_id") in metadata
    }
    special = SpecialTokens(metadata.get("tokenizer.ggml.bos_token_id"), eos_token_ids(metadata), literals)
    to_bytes = sentencepiece_bytes if sentencepiece else byte_level_bytes
    return Tokenizer(core, to_bytes, special, metadata.get("tokenizer.chat_template"))


def gguf_tokenizer_digest(metadata: Mapping[str, Any]) -> str:
    """Hex blake3 over all `tokenizer.*` metadata, in a fixed order and form."""
    parts = {key: value for key, value in metadata.items() if key.startswith("tokenizer.")}
    return blake3(orjson.dumps(parts, option=orjson.OPT_SORT_KEYS)).hexdigest()


def _checked_kind(metadata: Mapping[str, Any], path: object) -> str:
    kind = metadata.get("tokenizer.ggml.model")
    if kind not in ("gpt2", "llama") or "tokenizer.ggml.tokens" not in metadata:
        raise ConfigError(
            f"{path} has a tokenizer of kind {kind!r}, supported are 'gpt2' (byte-level BPE) and 'llama' "
            f"(sentencepiece BPE); use the Hugging Face directory of this model"
        )
    return kind


def _byte_level_bpe(metadata: Mapping[str, Any], path: object) -> tokenizers.Tokenizer:
    tag = metadata.get("tokenizer.ggml.pre")
    if tag not in _PRE_TOKENIZERS:
        raise ConfigError(
            f"{path} asks for pre-tokenizer {tag!r}, known are {', '.join(_PRE_TOKENIZERS)}; "
            f"use the Hugging Face directory of this model"
        )
    tokens, merges = metadata["tokenizer.ggml.tokens"], metadata.get("tokenizer.ggml.merges", [])
    core = tokenizers.Tokenizer(_bpe(tokens, merges, tag, path))
    core.pre_tokenizer = _PRE_TOKENIZERS[tag]()
    if tag == "qwen2":
        core.normalizer = normalizers.NFC()
    return core


def _bpe(tokens: list[str], merges: list[str], tag: str, path: object) -> models.BPE:
    vocab = {token: token_id for token_id, token in enumerate(tokens)}
    pairs = [(left, right) for left, _, right in (merge.partition(" ") for merge in merges)]
    if len(vocab) != len(tokens):
        raise ConfigError(f"{path} lists the same token twice; convert the model again")
    try:
        return models.BPE(vocab, pairs, ignore_merges=tag == "llama-bpe")
    except Exception as error:  # the library raises bare Exception for a merge outside the vocabulary
        raise ConfigError(
            f"{path} has merges that do not fit its tokens ({error}); convert it again"
        ) from None


def _surround(core: tokenizers.Tokenizer, metadata: Mapping[str, Any], tokens: list[str]) -> None:
    """Put BOS and EOS around texts where the file asks for it (Llama of any age: BOS unless it says no)."""
    of_llama = metadata["tokenizer.ggml.model"] == "llama" or metadata["tokenizer.ggml.pre"] == "llama-bpe"
    defaults = {"bos": of_llama, "eos": False}
    ids = {
        name: metadata[f"tokenizer.ggml.{name}_token_id"]
        for name, default in defaults.items()
        if metadata.get(f"tokenizer.ggml.add_{name}_token", default)
        and f"tokenizer.ggml.{name}_token_id" in metadata
    }
    if ids:
        before, after = ([tokens[ids[name]]] if name in ids else [] for name in ("bos", "eos"))
        core.post_processor = processors.TemplateProcessing(
            single=[*before, "$A", *after], special_tokens=[(tokens[i], i) for i in set(ids.values())]
        )
