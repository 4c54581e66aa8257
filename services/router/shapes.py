"""Answers in OpenAI's two shapes, whole and as stream chunks.

Extensions follow vLLM's names: `token_ids` in each choice, `prompt_token_ids` once (completions: in
the first choice of each prompt; chat: beside `choices`).
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Iterable
from typing import Any, Generic, TypeVar

import orjson

from checkpoint.tokenizer import Tokenizer
from services.router.choice import Piece, Token
from services.router.logprobs import chat_logprobs, completion_logprobs, prompt_tokens
from services.router.part import Part
from services.router.schemas import ChatBody, CompletionBody, GenerationBody
from services.router.sse import event

JSON = dict[str, Any]
CUT = "\ufdd0"
"""A Unicode noncharacter, which stands nowhere else in an event."""
B = TypeVar("B", bound=GenerationBody)


class Shape(ABC, Generic[B]):
    """Turns pieces into JSON. Knows which choices it has opened."""

    id_prefix: str
    object_name: str
    chunk_name: str

    def __init__(self, body: B, tokenizer: Tokenizer, model: str, generation_id: str) -> None:
        self._body = body
        self._tokenizer = tokenizer
        self._frames: dict[int, tuple[bytes, bytes]] = {}  # of the choices that are open
        self._head = {"id": f"{self.id_prefix}-{generation_id}", "created": int(time.time()), "model": model}
        self._only_text = body.num_logprobs is None and not body.return_token_ids

    def events(self, pieces: Iterable[tuple[Part, Piece]]) -> bytes:
        """The stream events for what became certain; none for nothing."""
        data = b""
        for part, piece in pieces:
            if piece.index not in self._frames:
                self._frames[piece.index] = self._frame(piece.index)
                data += b"".join(map(event, self._opening(part, piece)))
            if self._only_text and piece.text and piece.finish_reason is None:
                before, after = self._frames[piece.index]
                data += before + orjson.dumps(piece.text) + after
            elif piece.text or piece.token_ids or piece.finish_reason:
                data += event(self._chunk([self._delta(piece)]))
        return data

    def _frame(self, index: int) -> tuple[bytes, bytes]:
        """What stands before and after the text in a choice's events that have nothing but text."""
        before, _, after = event(self._chunk([self._delta(Piece(index, CUT))])).partition(orjson.dumps(CUT))
        return before, after

    def usage_event(self, usage: JSON) -> bytes:
        """The one extra event before [DONE] that `include_usage` asks for."""
        return event({**self._chunk([]), "usage": usage})

    def whole(self, answers: Iterable[tuple[Part, Piece]], usage: JSON) -> JSON:
        """The answer of a request without stream; one merged piece a choice, in order."""
        answers = list(answers)
        choices = [self._choice(part, piece) for part, piece in answers]
        body = {**self._head, "object": self.object_name, "choices": choices, "usage": usage}
        return body | self._beside(answers[0][0])

    def _chunk(self, choices: list[JSON]) -> JSON:
        event = {**self._head, "object": self.chunk_name, "choices": choices}
        return event | {"usage": None} if self._body.include_usage else event

    def _token_ids(self, token_ids: Iterable[int]) -> JSON:
        return {"token_ids": list(token_ids)} if self._body.return_token_ids else {}

    def _beside(self, part: Part) -> JSON:
        """What stands beside `choices`, once."""
        return {}

    @abstractmethod
    def _opening(self, part: Part, piece: Piece) -> list[JSON]:
        """Events before the first of a choice."""

    @abstractmethod
    def _delta(self, piece: Piece) -> JSON: ...

    @abstractmethod
    def _choice(self, part: Part, piece: Piece) -> JSON: ...


class CompletionShape(Shape[CompletionBody]):
    id_prefix, object_name, chunk_name = "cmpl", "text_completion", "text_completion"

    def __init__(self, body: CompletionBody, tokenizer: Tokenizer, model: str, generation_id: str) -> None:
        super().__init__(body, tokenizer, model, generation_id)
        self._echoed: dict[int, int] = {}  # choice -> characters of echo before its own text

    def _opening(self, part: Part, piece: Piece) -> list[JSON]:
        extras = self._prompt_ids(part, piece.index)
        if not self._body.echo and not extras:
            return []
        echo, tokens = self._echo(part, piece.index)
        choice = self._entry(Piece(piece.index, echo, scored=tokens), base=0)
        return [self._chunk([choice | extras])]

    def _delta(self, piece: Piece) -> JSON:
        return self._entry(piece, self._echoed.get(piece.index, 0))

    def _choice(self, part: Part, piece: Piece) -> JSON:
        echo, tokens = self._echo(part, piece.index)
        shifted = [Token(t.token_id, t.offset + len(echo), t.logprob) for t in piece.scored]
        whole = Piece(piece.index, echo + piece.text, piece.token_ids, tokens + shifted, piece.finish_reason)
        return self._entry(whole, base=0) | self._prompt_ids(part, piece.index)

    def _entry(self, piece: Piece, base: int) -> JSON:
        wanted = self._body.logprobs is not None
        return {
            "index": piece.index,
            "text": piece.text,
            "logprobs": completion_logprobs(self._tokenizer, piece.scored, base) if wanted else None,
            "finish_reason": piece.finish_reason,
        } | self._token_ids(piece.token_ids)

    def _echo(self, part: Part, index: int) -> tuple[str, list[Token]]:
        if not self._body.echo:
            return "", []
        text = part.prompt.text or ""
        self._echoed[index] = len(text)
        if not self._body.prompt_logprobs:
            return text, []
        return text, prompt_tokens(self._tokenizer, part.prompt.token_ids, part.logprobs, len(text))

    def _prompt_ids(self, part: Part, index: int) -> JSON:
        if not self._body.return_token_ids or index != part.choices[0].index:
            return {}
        return {"prompt_token_ids": list(part.prompt.token_ids)}


class ChatShape(Shape[ChatBody]):
    id_prefix, object_name, chunk_name = "chatcmpl", "chat.completion", "chat.completion.chunk"

    def _opening(self, part: Part, piece: Piece) -> list[JSON]:
        delta = {"role": "assistant", "content": ""}
        choice = {"index": piece.index, "delta": delta, "logprobs": None, "finish_reason": None}
        first = len(self._frames) == 1
        return [self._chunk([choice]) | (self._beside(part) if first else {})]

    def _delta(self, piece: Piece) -> JSON:
        return self._entry(piece, {"delta": {"content": piece.text} if piece.text else {}})

    def _choice(self, part: Part, piece: Piece) -> JSON:
        message = {"role": "assistant", "content": piece.text, "refusal": None}
        return self._entry(piece, {"message": message})

    def _entry(self, piece: Piece, content: JSON) -> JSON:
        return {
            "index": piece.index,
            **content,
            "logprobs": chat_logprobs(self._tokenizer, piece.scored) if self._body.logprobs else None,
            "finish_reason": piece.finish_reason,
        } | self._token_ids(piece.token_ids)

    def _beside(self, part: Part) -> JSON:
        if not self._body.return_token_ids:
            return {}
        return {"prompt_token_ids": list(part.prompt.token_ids)}
