"""Text to token ids and back, over Hugging Face's `tokenizers`; the same for GGUF and HF models."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property

import tokenizers
from tokenizers import normalizers

from core.errors import InvalidParameter

GUARD = "\ufdd0"
"""A Unicode noncharacter: it marks control strings that must be read as plain text."""


@dataclass(frozen=True, slots=True)
class SpecialTokens:
    """What the model's files say about special tokens.

    `literals` are those that chat templates may name, e.g. `{"bos_token": "<s>"}`.
    """

    bos_token_id: int | None = None
    eos_token_ids: frozenset[int] = frozenset()
    literals: Mapping[str, str] = field(default_factory=dict)


class Tokenizer:
    """One model's tokenizer. Thread-safe: nothing changes after construction but a cache of bytes.

    `vocab_size` counts the tokenizer's own ids; the model may have more rows (padding), whose ids
    decode to nothing. `add_bos`: whether `encode` puts a BOS before text by default.
    """

    def __init__(
        self,
        core: tokenizers.Tokenizer,
        to_bytes: Callable[[str], bytes],
        special: SpecialTokens,
        chat_template: str | None,
    ) -> None:
        core.no_truncation()
        core.no_padding()
        self._core = core
        self._to_bytes = to_bytes
        added = core.get_added_tokens_decoder()
        self._literals = {token_id: token.content for token_id, token in added.items()}
        self._special_ids = frozenset(token_id for token_id, token in added.items() if token.special)
        self._control_start = _control_start(self._literals[i] for i in self._special_ids)
        self._guarded = _guarded_twin(core)
        self._bytes_of: dict[int, bytes] = {}
        self.bos_token_id = special.bos_token_id
        self.eos_token_ids = special.eos_token_ids
        self.special_literals = dict(special.literals)
        self.chat_template = chat_template
        self.vocab_size: int = core.get_vocab_size(with_added_tokens=True)
        self.add_bos = special.bos_token_id is not None and (
            core.encode("", add_special_tokens=True).ids[:1] == [special.bos_token_id]
        )

    def encode(self, text: str, add_special: bool = True, parse_special: bool = True) -> list[int]:
        """Token ids of `text`. Raises InvalidParameter for text that is not valid Unicode.

        `add_special`: add what the model wants around a text (BOS, EOS), as its files say.
        `parse_special`: False encodes control tokens written in the text as ordinary characters.
        """
        if not parse_special:
            guarded = self.guard(text)
            if guarded != text:
                return self.encode_guarded(guarded, add_special)
        return _encode(self._core, text, add_special)

    def guard(self, text: str) -> str:
        """Mark every control string in `text` as plain text; text without one comes back unchanged."""
        # First, as taking marks out of the text can put a control string together.
        clean = text.replace(GUARD, "")
        guarded, count = self._control_start.subn(rf"\g<0>{GUARD}", clean)
        return guarded if count else text

    def encode_guarded(self, text: str, add_special: bool = True) -> list[int]:
        """Ids of text with guarded parts: marks vanish, what they broke is not a control token."""
        return _encode(self._guarded, text, add_special)

    @cached_property
    def longest_token_nbytes(self) -> int:
        """Bytes of the longest token: a text of n bytes has at least n divided by this many tokens."""
        return max(len(self.token_bytes(token_id)) for token_id in range(self.vocab_size))

    def token_bytes(self, token_id: int) -> bytes:
        """The exact bytes of a token; b"" for an id that the vocabulary does not have."""
        known = self._bytes_of.get(token_id)
        if known is None:
            known = self._bytes_of[token_id] = self._look_up(token_id)
        return known

    def _look_up(self, token_id: int) -> bytes:
        if token_id in self._literals:
            return self._literals[token_id].encode()
        token = self._core.id_to_token(token_id) if 0 <= token_id < 2**32 else None
        return b"" if token is None else self._to_bytes(token)

    def is_special(self, token_id: int) -> bool:
        """Whether the id is a control token (BOS, turn marks), not text."""
        return token_id in self._special_ids

    def decode(self, token_ids: Iterable[int], skip_special: bool = True) -> str:
        """Text of the ids: their bytes joined, with U+FFFD for what is not UTF-8."""
        text = bytearray()  # joining millions of pieces at once would let no other thread run
        for token_id in token_ids:
            if not (skip_special and token_id in self._special_ids):
                text += self.token_bytes(token_id)
        return text.decode(errors="replace")


def _encode(core: tokenizers.Tokenizer, text: str, add_special: bool) -> list[int]:
    try:
        text.encode()
    except UnicodeEncodeError:
        raise InvalidParameter(
            "the text holds half of a surrogate pair, which is not valid Unicode; send valid UTF-8"
        ) from None
    # A batch of one: unlike `encode` it lets other Python threads run meanwhile. "Fast": without offsets.
    return core.encode_batch_fast([text], add_special_tokens=add_special)[0].ids


def _control_start(contents: Iterable[str]) -> re.Pattern[str]:
    """Matches the first character of every control string, overlapping ones too.

    A mark after that character breaks the string for the matcher. Grouped by it, so that the search
    over long texts stops only where one may begin.
    """
    rests: dict[str, list[str]] = {}
    for content in sorted(contents):
        rests.setdefault(content[0], []).append(re.escape(content[1:]))
    groups = (f"{re.escape(first)}(?={'|'.join(group)})" for first, group in rests.items())
    return re.compile("|".join(groups) or r"(?!)")


def _guarded_twin(core: tokenizers.Tokenizer) -> tokenizers.Tokenizer:
    """A tokenizer on the same model whose normalizer deletes GUARD.

    Added tokens are looked for before normalizing, so a guarded one is not seen, and what is left of
    it is ordinary text in its ordinary surroundings: no split where the mark was.
    """
    twin = tokenizers.Tokenizer(core.model)
    unguard = normalizers.Replace(GUARD, "")
    own = core.normalizer
    twin.normalizer = unguard if own is None else normalizers.Sequence([unguard, own])
    if core.pre_tokenizer is not None:
        twin.pre_tokenizer = core.pre_tokenizer
    if core.post_processor is not None:
        twin.post_processor = core.post_processor
    for _, token in sorted(core.get_added_tokens_decoder().items()):
        if token.special:
            twin.add_special_tokens([_matched_before_normalizing(token)])
        else:
            twin.add_tokens([token])
    return twin


def _matched_before_normalizing(token: tokenizers.AddedToken) -> tokenizers.AddedToken:
    return tokenizers.AddedToken(
        token.content,
        single_word=token.single_word,
        lstrip=token.lstrip,
        rstrip=token.rstrip,
        normalized=False,
        special=True,
    )
