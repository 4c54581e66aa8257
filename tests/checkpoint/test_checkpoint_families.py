"""Tokenizers of the other families: Qwen's against transformers, sentencepiece against its own rule; EOS sets."""

from __future__ import annotations

import random
from itertools import pairwise
from pathlib import Path

import pytest
from checkpoint_models import CHATML, SPECIAL, random_weights, tiny_config, write_gguf
from tokenizers import Tokenizer as Core
from tokenizers import models, pre_tokenizers, trainers
from transformers import Qwen2Tokenizer

from checkpoint.chat import render_chat
from checkpoint.gguf_config import eos_token_ids
from checkpoint.gguf_tokenizer import tokenizer_from_gguf
from checkpoint.hf_checkpoint import HFTokenizerFiles
from checkpoint.hf_tokenizer import tokenizer_from_hf
from checkpoint.open import open_checkpoint
from checkpoint.token_bytes import byte_level_bytes
from checkpoint.tokenizer import SpecialTokens, Tokenizer
from core.errors import ConfigError

TEXT = Path(__file__).read_text()
HARD = [
    "Don't  you'LL 12345,67 x²",
    "naïve Å A\u030a 삼겹살 🍎👨‍👩‍👧",
    "a\r\n\n  b\t\tc   \n",
    "<|im_start|>user\nhi<|im_end|>\n<|endoftext|>",
    "   leading and trailing   ",
]
CONTROL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")


# ---- Qwen


@pytest.fixture(scope="module")
def qwen() -> tuple[dict[str, int], list[tuple[str, str]]]:
    """(vocabulary, merges) of a small byte-level BPE, learned from this file."""
    core = Core(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    core.train_from_iterator([TEXT], trainers.BpeTrainer(vocab_size=700, initial_alphabet=alphabet))
    vocab = core.get_vocab()
    ranked = sorted((token for token in vocab if len(token) > 1), key=vocab.__getitem__)
    merges = []
    for token in ranked:
        cut = next(i for i in range(1, len(token)) if _older(vocab, token, i))
        merges.append((token[:cut], token[cut:]))
    return vocab, merges


def _older(vocab: dict[str, int], token: str, cut: int) -> bool:
    halves = (token[:cut], token[cut:])
    return all(half in vocab and vocab[half] < vocab[token] for half in halves)


def test_qwen_ids_are_those_of_transformers(qwen, tmp_path) -> None:
    vocab, merges = qwen
    theirs = Qwen2Tokenizer(vocab=dict(vocab), merges=list(merges), extra_special_tokens=list(CONTROL[1:]))
    tokens = [*sorted(vocab, key=vocab.__getitem__), *CONTROL]
    metadata = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "qwen2",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [3 if token in CONTROL else 1 for token in tokens],
        "tokenizer.ggml.merges": [" ".join(pair) for pair in merges],
        "tokenizer.ggml.eos_token_id": tokens.index("<|im_end|>"),
    }
    from_gguf = tokenizer_from_gguf(metadata, "m.gguf")
    theirs.save_pretrained(tmp_path)
    from_hf = tokenizer_from_hf(HFTokenizerFiles(tmp_path), None, frozenset())
    texts = [*HARD, *TEXT.splitlines(keepends=True)]
    for text in texts:
        want = theirs(text)["input_ids"]
        assert from_gguf.encode(text) == from_hf.encode(text) == want
        assert from_gguf.decode(want, skip_special=False) == theirs.decode(want)
    assert not from_gguf.add_bos


@pytest.mark.parametrize(
    ("tag", "ends"),
    [
        ("qwen2", ["<|endoftext|>", "<|im_end|>"]),
        ("llama-bpe", ["<|end_of_text|>", "<|eom_id|>", "<|eot_id|>"]),
        ("smollm", []),
    ],
)
def test_gguf_eos_are_all_that_the_family_stops_at(tag: str, ends: list[str]) -> None:
    """Pain F5: GGUF has one id of a kind where generation_config.json has a list."""
    tokens = ["a", "</s>", "<|endoftext|>", "<|im_end|>", "<|end_of_text|>", "<|eom_id|>", "<|eot_id|>"]
    metadata = {"tokenizer.ggml.tokens": tokens, "tokenizer.ggml.pre": tag, "tokenizer.ggml.eos_token_id": 1}
    assert eos_token_ids(metadata) == {1, *(tokens.index(end) for end in ends)}


def test_a_qwen_file_stops_at_the_end_of_a_turn(tmp_path) -> None:
    config = tiny_config(architecture="qwen2")
    checkpoint = open_checkpoint(
        str(write_gguf(tmp_path / "m.gguf", config, random_weights(config), pre="qwen2"))
    )
    tokenizer = checkpoint.load_tokenizer()
    assert checkpoint.config.eos_token_ids == tokenizer.eos_token_ids == {1, SPECIAL.index("<|im_end|>")}
    assert tokenizer.chat_template == CHATML
    assert render_chat(tokenizer, [{"role": "user", "content": "hi"}]).endswith("<|im_start|>assistant\n")


# What Qwen3's template leans on: namespaces, slices from the end, methods of strings, tests, absent names.
TURNS = """{%- set seen = namespace(last=messages|length - 1, searching=true) %}
{%- for message in messages[::-1] %}
    {%- if seen.searching and message.role == "user" and message.content is string and not message.content.startswith("<tool>") %}
        {%- set seen.last = messages|length - 1 - loop.index0 %}{%- set seen.searching = false %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- set text = message.content %}
    {%- if "</think>" in text and loop.index0 < seen.last %}
        {%- set text = text.split("</think>")[-1].lstrip("\n") %}
    {%- endif %}
    {{- "<|im_start|>" + message.role + "\n" + text + "<|im_end|>\n" }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- "<|im_start|>assistant\n" }}
    {%- if enable_thinking is defined and enable_thinking is false %}{{- "<think>\n\n</think>\n\n" }}{%- endif %}
{%- endif %}"""


def test_a_template_of_qwens_kind_renders_as_transformers_does(qwen) -> None:
    vocab, merges = qwen
    theirs = Qwen2Tokenizer(vocab=dict(vocab), merges=list(merges))
    special = SpecialTokens(None, frozenset(), {"eos_token": "<|endoftext|>"})
    ours = Tokenizer(Core(models.BPE(dict(vocab), list(merges))), byte_level_bytes, special, TURNS)
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Häuser & <b>?"},
        {"role": "assistant", "content": "<think>\nhm\n</think>\n\nYes."},
        {"role": "user", "content": "Why?"},
        {"role": "user", "content": "<tool>x"},
    ]
    for count in range(1, len(messages) + 1):
        want = theirs.apply_chat_template(
            messages[:count], chat_template=TURNS, tokenize=False, add_generation_prompt=True
        )
        assert render_chat(ours, messages[:count]) == want


# ---- sentencepiece


PIECES = ["▁", "e", "t", "a", "h", "n", "s", "▁t", "he", "▁the", "th", "at", "▁a", "an", "en", "nt", "▁that"]
PIECES += ["ea", "ate", "hat", "▁▁", "▁s", "ta", "tes", "▁ta"]


def sentencepiece_metadata(pieces: list[str]) -> dict[str, object]:
    """Scores fall with the id, as sentencepiece writes them for BPE; singles come last."""
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *pieces]
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.scores": [0.0] * 259 + [-float(i) for i in range(len(pieces))],
        "tokenizer.ggml.token_type": [2, 3, 3] + [6] * 256 + [1] * len(pieces),
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
    }


def by_the_rule(pieces: list[str], text: str) -> list[int]:
    """Join the neighbours with the best union, the first of equals, until no union is a piece."""
    symbols = list("▁" + text.replace(" ", "▁"))
    while True:
        unions = [(pieces.index(a + b), i) for i, (a, b) in enumerate(pairwise(symbols)) if a + b in pieces]
        if not unions:
            break
        _, at = min(unions)
        symbols[at : at + 2] = ["".join(symbols[at : at + 2])]
    ids = []
    for symbol in symbols:
        known = symbol in pieces
        ids += [259 + pieces.index(symbol)] if known else [3 + byte for byte in symbol.encode()]
    return ids


@pytest.mark.parametrize("seed", range(5))
def test_sentencepiece_joins_as_its_scores_say(seed: int) -> None:
    rng = random.Random(seed)
    pieces = rng.sample(PIECES, len(PIECES))
    tokenizer = tokenizer_from_gguf(sentencepiece_metadata(pieces), "m.gguf")
    for _ in range(200):
        text = "".join(rng.choice("ethans  é🍎\n") for _ in range(rng.randrange(1, 30)))
        assert tokenizer.encode(text, add_special=False) == by_the_rule(pieces, text)


def test_sentencepiece_surroundings() -> None:
    """BOS unless the file says no; a text begins with a space; what is in no piece is bytes."""
    tokenizer: Tokenizer = tokenizer_from_gguf(sentencepiece_metadata(PIECES), "m.gguf")
    assert tokenizer.add_bos
    assert tokenizer.encode("that") == [1, 259 + PIECES.index("▁that")]
    assert tokenizer.decode(tokenizer.encode("the é</s>")) == " the é"
    assert tokenizer.is_special(0)
    changes = {"tokenizer.ggml.add_bos_token": False, "tokenizer.ggml.add_space_prefix": False}
    plain = tokenizer_from_gguf(sentencepiece_metadata(PIECES) | changes, "m.gguf")
    assert plain.decode(plain.encode("that é")) == "that é"


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"tokenizer.ggml.scores": [0.0]}, "one score"),
        ({"tokenizer.ggml.precompiled_charsmap": [1]}, "precompiled_charsmap"),
        ({"tokenizer.ggml.remove_extra_whitespaces": True}, "remove_extra_whitespaces"),
    ],
)
def test_other_kinds_of_sentencepiece_are_refused(changes: dict[str, object], told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        tokenizer_from_gguf(sentencepiece_metadata(PIECES) | changes, "m.gguf")
