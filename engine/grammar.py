"""Grammars as matchers over the model's tokens, by llguidance."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Collection, Sequence
from functools import cached_property

import numpy as np
import torch
from llguidance import LLMatcher, LLTokenizer, TokenizerWrapper
from llguidance.numpy import allocate_token_bitmask, fill_next_token_bitmask

from checkpoint.grammar import LIMITS, length_problem, reason, refusal
from checkpoint.tokenizer import Tokenizer
from core.request import Grammar, SamplingParams

MAX_COMPILED = 32
"""Grammars kept; each takes kilobytes as a rule, tens of megabytes at worst (`checkpoint.grammar.LIMITS`)."""

SILENT = 0


class GrammarMatcher:
    """An `engine.matcher.Matcher`. `barred` end tokens are allowed only when nothing else is."""

    def __init__(self, state: LLMatcher, vocab_size: int, barred: Sequence[int], num_seen: int = 0) -> None:
        self._state, self._vocab_size, self._barred = state, vocab_size, list(barred)
        self._mask = allocate_token_bitmask(1, vocab_size)
        self.num_seen = num_seen

    @property
    def finished(self) -> bool:
        return self._state.is_stopped() and not self._state.is_error()

    @property
    def error(self) -> str:
        return reason(self._state.get_error()) if self._state.is_error() else ""

    def advance(self, token_ids: Sequence[int]) -> None:
        for token_id in token_ids:
            self._state.consume_token(token_id)
        self.num_seen += len(token_ids)

    def allowed(self) -> torch.Tensor:
        fill_next_token_bitmask(self._state, self._mask)
        bits = np.unpackbits(self._mask.view(np.uint8)[0], count=self._vocab_size, bitorder="little")
        allowed = bits.view(np.bool_)
        if self._barred:
            barred = allowed[self._barred].copy()
            allowed[self._barred] = False
            if not allowed.any():
                allowed[self._barred] = barred
        return torch.from_numpy(allowed)

    def fork(self) -> GrammarMatcher:
        return GrammarMatcher(self._state.deep_copy(), self._vocab_size, self._barred, self.num_seen)


class GrammarCompiler:
    """Compiles grammars and keeps the last MAX_COMPILED. Thread-safe."""

    def __init__(
        self, load_tokenizer: Callable[[], Tokenizer], vocab_size: int, eos_token_ids: Collection[int]
    ) -> None:
        self._load_tokenizer, self._vocab_size = load_tokenizer, vocab_size
        self._eos_token_ids = sorted(eos_token_ids)
        self._compiled: OrderedDict[str, LLMatcher] = OrderedDict()
        self._lock = threading.Lock()

    def load(self) -> None:
        """Read the tokenizer and sort its tokens, half a second's work, unless that is done."""
        _ = self._tokens

    def cached(self, sampling: SamplingParams) -> GrammarMatcher | None:
        """A matcher at the beginning of the request's grammar, if that is compiled already."""
        assert sampling.grammar is not None
        with self._lock:
            root = self._compiled.get(sampling.grammar.text)
            if root is None:
                return None
            self._compiled.move_to_end(sampling.grammar.text)
        return self._matcher(root, sampling)

    def compile(self, sampling: SamplingParams) -> GrammarMatcher:
        """The same, compiling it if need be: on a `GrammarThread` only. Raises InvalidParameter."""
        grammar = sampling.grammar
        assert grammar is not None
        if matcher := self.cached(sampling):
            return matcher
        root = self._compile(grammar)
        with self._lock:
            self._compiled[grammar.text] = root
            while len(self._compiled) > MAX_COMPILED:
                self._compiled.popitem(last=False)
        return self._matcher(root, sampling)

    def _matcher(self, root: LLMatcher, sampling: SamplingParams) -> GrammarMatcher:
        barred = [i for i in self._eos_token_ids if i not in sampling.stop_token_ids]
        return GrammarMatcher(root.deep_copy(), self._vocab_size, barred)

    def _compile(self, grammar: Grammar) -> LLMatcher:
        if not self._eos_token_ids:
            raise refusal(grammar.param, "this model has no end token, which a grammar needs")
        if too_long := length_problem(grammar.text):
            raise refusal(grammar.param, too_long)
        root = LLMatcher(self._tokens, grammar.text, log_level=SILENT, limits=LIMITS)
        if root.is_error():
            raise refusal(grammar.param, root.get_error())
        return root

    @cached_property
    def _tokens(self) -> LLTokenizer:
        vocabulary = _Vocabulary(self._load_tokenizer(), self._vocab_size, self._eos_token_ids)
        return LLTokenizer(
            TokenizerWrapper(vocabulary), n_vocab=self._vocab_size, eos_token=self._eos_token_ids
        )


class _Vocabulary:
    """A tokenizer as llguidance takes it: the bytes of each id, and text to ids."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, eos_token_ids: Sequence[int]) -> None:
        self._tokenizer = tokenizer
        self.eos_token_id = eos_token_ids[0]
        self.bos_token_id = tokenizer.bos_token_id
        self.tokens = [tokenizer.token_bytes(i) for i in range(vocab_size)]
        self.special_token_ids = [i for i in range(vocab_size) if tokenizer.is_special(i)]

    def __call__(self, text: str) -> list[int]:
        if not isinstance(text, str):
            raise TypeError("text is a str")  # how the wrapper learns that bytes are not taken
        return self._tokenizer.encode(text, add_special=False, parse_special=False)
