"""The model's text side: prompts to token ids, once, for every worker.

Short texts are read and encoded on the event loop, long ones in a thread: one client's book must not stop
everybody's stream.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TypeVar

from checkpoint.chat import encode_chat
from checkpoint.grammar import GrammarThread
from checkpoint.open import open_checkpoint
from core.errors import ContextLengthExceeded, InvalidParameter
from core.request import Grammar
from core.settings import Settings
from services.router import structured
from services.router.grammar_checker import GrammarChecker
from services.router.parse import Model, check_token_ids, parse
from services.router.schemas import (
    ChatBody,
    CompletionBody,
    DetokenizeBody,
    GenerationBody,
    Message,
    TokenizeBody,
)

LONG_TEXT_CHARS = 1024
"""About half a millisecond of encoding, and several times what a thread costs."""

LONG_BODY_NBYTES = 2**16
ENCODER_THREADS = 2

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Prompt:
    """`text` is what an echo gives back, where one may be asked for."""

    token_ids: tuple[int, ...]
    text: str | None = None


@dataclass(frozen=True, slots=True)
class Constraints:
    """What the answer's text must not or has to be, in token ids and as a grammar."""

    bad_words: tuple[tuple[int, ...], ...] = ()
    grammar: Grammar | None = None


class TextSide:
    """Tokenizer and names of the served model. Made by `load`, immutable afterwards."""

    def __init__(self, settings: Settings, count_fault: Callable[[str], None]) -> None:
        """Open the model's files; takes a second. Raises ConfigError."""
        checkpoint = open_checkpoint(settings.model)
        self.name = settings.served_model_name or checkpoint.name
        self.tokenizer = checkpoint.load_tokenizer()
        self.tokenizer_digest = checkpoint.tokenizer_digest
        self._longest_token_nbytes = self.tokenizer.longest_token_nbytes
        self.eos_token_ids = checkpoint.config.eos_token_ids
        self.max_position = min(checkpoint.config.max_position, settings.max_model_len or 2**31)
        # Ids above the tokenizer's own are padding rows of the embedding: no text has them.
        self.vocab_size = min(checkpoint.config.vocab_size, self.tokenizer.vocab_size)
        self._special_in_chat = settings.special_tokens_in_chat
        self._pool = ThreadPoolExecutor(ENCODER_THREADS, thread_name_prefix="encode")
        self._grammar_thread, self._checker = GrammarThread(), GrammarChecker(count_fault)
        self._grammar_thread.begin(self._checker.start)

    async def read(self, raw: bytes, kind: type[Model]) -> Model:
        """`parse`, and raises what it does."""
        if len(raw) < LONG_BODY_NBYTES:
            return parse(raw, kind)
        return await self._aside(lambda: parse(raw, kind))

    async def prompts(self, body: GenerationBody) -> list[Prompt]:
        """Token ids of the request's prompts. Raises InvalidParameter for what cannot be generated from."""
        check_token_ids(body.stop_token_ids, self.vocab_size, "stop_token_ids")
        check_token_ids(body.logit_bias, self.vocab_size, "logit_bias")
        check_token_ids(body.allowed_token_ids or (), self.vocab_size, "allowed_token_ids")
        if isinstance(body, ChatBody):
            return [Prompt(tuple(await self.encode_chat(body.messages)))]
        assert isinstance(body, CompletionBody)
        num_chars = sum(map(len, body.prompt))
        prompts = await self._run(num_chars, lambda: [self._prompt(p, body.echo) for p in body.prompt])
        if not all(prompt.token_ids for prompt in prompts):
            raise InvalidParameter("prompt: an empty prompt has no token to begin from", param="prompt")
        return prompts

    def _prompt(self, prompt: str | list[int], echo: bool) -> Prompt:
        if isinstance(prompt, str):
            self._refuse_hopeless(len(prompt), "prompt")
            ids = self._encode(prompt, True)
            self._refuse_longer(len(ids), "prompt")
            return Prompt(tuple(ids), prompt)
        self._refuse_longer(len(prompt), "prompt")
        check_token_ids(prompt, self.vocab_size, "prompt")
        return Prompt(tuple(prompt), self.tokenizer.decode(prompt, skip_special=False) if echo else None)

    async def constraints(self, body: GenerationBody) -> Constraints:
        """Raises InvalidParameter for what cannot be tokenized or is no valid grammar."""
        grammar = None
        if structured.is_asked_for(body):
            field = "response_format" if body.structured_outputs is None else "structured_outputs"
            grammar = await self._grammar_thread.run(lambda: self._grammar(body), field)
        num_chars = 2 * sum(map(len, body.bad_words))
        words = await self._run(num_chars, lambda: {ids for w in body.bad_words for ids in self._forms(w)})
        return Constraints(tuple(sorted(words - {()})), grammar)

    def _grammar(self, body: GenerationBody) -> Grammar:
        grammar = structured.grammar_of(body)
        self._checker.check(grammar)
        return grammar

    def _forms(self, word: str) -> list[tuple[int, ...]]:
        """A bad word's token ids at the beginning of a text and after a space."""
        bare = word.removeprefix(" ") or word
        try:
            return [
                tuple(self.tokenizer.encode(text, add_special=False, parse_special=False))
                for text in (bare, f" {bare}")
            ]
        except InvalidParameter as error:
            raise InvalidParameter(f"bad_words: {error.message}", param="bad_words") from None

    async def encode(self, text: str, add_special: bool = True) -> list[int]:
        """Ids of a text, control tokens in it included, as the model's own tokenizer reads it."""
        return await self._run(len(text), lambda: self._encode(text, add_special))

    def _encode(self, text: str, add_special: bool) -> list[int]:
        try:
            return self.tokenizer.encode(text, add_special=add_special, parse_special=True)
        except InvalidParameter as error:
            raise InvalidParameter(error.message, param="prompt") from None

    async def encode_chat(self, messages: list[Message]) -> list[int]:
        """Ids of a conversation up to where the answer begins."""
        if len(messages) > self.max_position:
            raise ContextLengthExceeded(
                f"{len(messages)} messages have at least as many tokens, the context is {self.max_position} "
                f"tokens; send fewer",
                param="messages",
            )
        turns = [message.rendered() for message in messages]
        size = sum(len(turn["content"]) for turn in turns)
        self._refuse_hopeless(size, "messages")
        return await self._run(
            size, lambda: encode_chat(self.tokenizer, turns, special_tokens_in_content=self._special_in_chat)
        )

    def _refuse_longer(self, num_tokens: int, param: str) -> None:
        """Before it is hashed to be planned."""
        if num_tokens > self.max_position:
            raise ContextLengthExceeded(
                f"the prompt has {num_tokens} tokens, the context is {self.max_position} tokens; shorten it",
                param=param,
            )

    def _refuse_hopeless(self, num_chars: int, param: str) -> None:
        """What is too long whatever its tokens are is not tokenized. Half the bound: normalizers shorten."""
        at_least = num_chars // (2 * self._longest_token_nbytes)
        if at_least > self.max_position:
            raise ContextLengthExceeded(
                f"the text of {num_chars} characters has over {at_least} tokens, the context is "
                f"{self.max_position} tokens; shorten it",
                param=param,
            )

    async def tokenize(self, body: TokenizeBody) -> list[int]:
        """Ids for `/tokenize`. Raises InvalidParameter unless exactly one of prompt and messages is given."""
        if (body.prompt is None) == (body.messages is None):
            raise InvalidParameter("send either prompt or messages", param="prompt")
        if body.messages is not None:
            return await self.encode_chat(body.messages)
        return await self.encode(body.prompt or "", body.add_special_tokens)

    async def detokenize(self, body: DetokenizeBody) -> str:
        """The text of `/detokenize`. Raises InvalidParameter for ids that the model does not have."""

        def decode() -> str:
            check_token_ids(body.tokens, self.vocab_size, "tokens")
            return self.tokenizer.decode(body.tokens, skip_special=False)

        return await self._run(len(body.tokens), decode)

    async def _run(self, num_chars: int, encode: Callable[[], T]) -> T:
        if num_chars < LONG_TEXT_CHARS:
            return encode()
        return await self._aside(encode)

    async def _aside(self, work: Callable[[], T]) -> T:
        """In a thread."""
        return await asyncio.get_running_loop().run_in_executor(self._pool, work)

    def close(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)
        self._grammar_thread.close()
        self._checker.close()
