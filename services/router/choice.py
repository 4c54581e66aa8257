"""One choice of an answer: tokens in, pieces of text out, cut at stop strings.

Text is released only when it is complete characters and cannot be part of a stop string; tokens and
their log probabilities travel with the first character they contributed, so all three stay in step.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from checkpoint.detokenize import Detokenizer
from checkpoint.tokenizer import Tokenizer
from core.request import FinishReason, TokenDelta, TokenLogprob
from services.router.stops import StopMatcher


class Token(NamedTuple):
    """A token and where its text begins in the choice's text (characters)."""

    token_id: int
    offset: int
    logprob: TokenLogprob | None = None


@dataclass(slots=True)
class Piece:
    """What became certain of a choice. `scored`: the tokens whose text is part of the answer.

    `token_ids` has also those of a stop string or the end token: all that were generated. `num_generated`:
    tokens that came meanwhile, released or not.
    """

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    scored: list[Token] = field(default_factory=list)
    finish_reason: str | None = None
    num_generated: int = 0

    def append(self, later: Piece) -> None:
        """Join the next piece of the same choice."""
        self.text += later.text
        self.token_ids += later.token_ids
        self.scored += later.scored
        self.finish_reason = later.finish_reason
        self.num_generated += later.num_generated


class Choice:
    """State of one choice. `finished` turns True with the piece that has a finish reason; `token_ids`: all
    that were generated so far, released or not."""

    def __init__(
        self,
        index: int,
        tokenizer: Tokenizer,
        stops: Sequence[str],
        stop_token_ids: Collection[int],
        min_tokens: int = 0,
    ) -> None:
        self.index = index
        self.token_ids: list[int] = []
        self.finished = False
        self._detokenizer = Detokenizer(tokenizer, skip_special=True)
        self._matcher = StopMatcher(stops)
        self._stop_token_ids = stop_token_ids
        self._min_tokens = min_tokens
        self._waiting: deque[Token] = deque()  # generated, their text not yet released
        self._num_chars = 0
        self._num_released = 0

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    def feed(self, delta: TokenDelta) -> Piece:
        """Take the next tokens; returns what they made certain, possibly nothing."""
        piece = Piece(self.index)
        last = len(delta.token_ids) - 1
        for position, token_id in enumerate(delta.token_ids):
            logprob = delta.logprobs[position] if position < len(delta.logprobs) else None
            ends = position == last and delta.finish_reason is FinishReason.STOP
            silent = ends and token_id in self._stop_token_ids
            self._waiting.append(Token(token_id, self._num_chars, logprob))
            self.token_ids.append(token_id)
            piece.num_generated += 1
            self._take(piece, "" if silent else self._detokenizer.push(token_id))
            if self._matcher.stopped:
                return self._finish(piece, FinishReason.STOP)
        if delta.finish_reason is not None:
            self._take(piece, self._detokenizer.finish())
            if not self._matcher.stopped:
                self._note(piece, self._matcher.flush())
            return self._finish(piece, FinishReason.STOP if self._matcher.stopped else delta.finish_reason)
        self._settle(piece)
        return piece

    def _take(self, piece: Piece, text: str) -> None:
        self._num_chars += len(text)
        self._note(piece, self._matcher.push(text, may_stop=self.num_tokens >= self._min_tokens))

    def _note(self, piece: Piece, released: str) -> None:
        piece.text += released
        self._num_released += len(released)

    def _settle(self, piece: Piece) -> None:
        """Let go of the tokens whose text has begun to be released."""
        while self._waiting and self._waiting[0].offset < self._num_released:
            token = self._waiting.popleft()
            piece.token_ids.append(token.token_id)
            piece.scored.append(token)

    def _finish(self, piece: Piece, reason: FinishReason) -> Piece:
        self._settle(piece)
        rest = list(self._waiting)
        self._waiting.clear()
        piece.token_ids += [token.token_id for token in rest]
        if not self._matcher.stopped:
            piece.scored += rest
        piece.finish_reason = reason.value
        self.finished = True
        return piece
