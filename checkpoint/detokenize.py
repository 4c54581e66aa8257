"""Token ids to text, one at a time, without ever sending half a character."""

from __future__ import annotations

import codecs

from checkpoint.tokenizer import Tokenizer

_utf8 = codecs.getincrementaldecoder("utf-8")


class Detokenizer:
    """Incremental `Tokenizer.decode`: all that `push` and `finish` return, joined, equals it."""

    def __init__(self, tokenizer: Tokenizer, skip_special: bool = True) -> None:
        self._tokenizer = tokenizer
        self._skip_special = skip_special
        self._decoder = _utf8(errors="replace")

    def push(self, token_id: int) -> str:
        """The characters that this token completes, possibly none."""
        if self._skip_special and self._tokenizer.is_special(token_id):
            return ""
        return self._decoder.decode(self._tokenizer.token_bytes(token_id))

    def finish(self) -> str:
        """What is left: U+FFFD for an incomplete character, else nothing. Ready for a new text after."""
        rest = self._decoder.decode(b"", final=True)
        self._decoder.reset()
        return rest
