"""Tokenizers of both formats: pre-tokenizer tag (F4), specials (F6), exact bytes."""

from __future__ import annotations

import copy
import json
from functools import cache

import pytest
import tokenizers
from checkpoint_models import TOKENS, random_weights, tiny_config, write_gguf, write_hf
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, normalizers, processors

from checkpoint.open import open_checkpoint
from checkpoint.token_bytes import sentencepiece_bytes
from checkpoint.tokenizer import GUARD, SpecialTokens, Tokenizer
from core.errors import ConfigError, InvalidParameter

MIXED = "Hello  1234, don't\t\n\n  삼겹살 🍎👨‍👩‍👧 Ω naïve\r\n<|im_end|> x<|im_start|>user"


def from_gguf(tmp_path, **options) -> Tokenizer:
    config = tiny_config()
    path = write_gguf(tmp_path / "m.gguf", config, random_weights(config), **options)
    return open_checkpoint(str(path)).load_tokenizer()


def from_hf(tmp_path, **settings_changes) -> Tokenizer:
    config = tiny_config()
    path = write_hf(tmp_path / "hf", config, random_weights(config))
    file = path / "tokenizer_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | settings_changes))
    return open_checkpoint(str(path)).load_tokenizer()


def sentencepiece() -> Tokenizer:
    """A tokenizer of Llama 2's kind: `▁` for space, bytes as fallback, a prefix space."""
    pieces = [
        "<unk>",
        "<s>",
        "</s>",
        *(f"<0x{byte:02X}>" for byte in range(256)),
        "▁",
        "a",
        "b",
        "▁a",
        "<",
        "s",
        ">",
    ]
    vocab = {piece: i for i, piece in enumerate(pieces)}
    core = tokenizers.Tokenizer(models.BPE(vocab, [("▁", "a")], unk_token="<unk>", byte_fallback=True))
    core.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    core.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    core.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in pieces[:3]])
    core.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return Tokenizer(core, sentencepiece_bytes, SpecialTokens(1, frozenset({2}), {"bos_token": "<s>"}), None)


@pytest.mark.parametrize(
    ("tag", "pieces"),
    [
        ("gpt-2", ["1234"]),
        ("llama-bpe", ["123", "4"]),
        ("qwen2", ["1", "2", "3", "4"]),
        ("smollm", ["1", "2", "3", "4"]),
    ],
)
def test_the_pre_tokenizer_tag_is_honoured(tmp_path, tag, pieces):
    tokenizer = from_gguf(tmp_path, pre=tag)
    ids = tokenizer.encode("1234", add_special=False)
    assert ids == [TOKENS.index(piece) for piece in pieces]
    assert tokenizer.add_bos == (tag == "llama-bpe")
    plain = tokenizer.encode(MIXED, add_special=False)
    assert tokenizer.decode(plain, skip_special=False) == MIXED


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"pre": "tekken"}, "'tekken'.*smollm"),
        ({"tokenizer_model": "t5"}, "'t5'.*Hugging Face directory"),
    ],
)
def test_an_unknown_tokenizer_is_refused(tmp_path, options, told):
    with pytest.raises(ConfigError, match=told):
        from_gguf(tmp_path, **options)


def test_both_formats_give_the_same_ids(tmp_path):
    ours, theirs = from_gguf(tmp_path), from_hf(tmp_path)
    assert ours.encode(MIXED, add_special=False) == theirs.encode(MIXED, add_special=False)
    assert ours.vocab_size == theirs.vocab_size == len(TOKENS)


def test_bos_follows_the_files(tmp_path):
    tokenizer = from_hf(tmp_path)
    assert tokenizer.add_bos
    assert tokenizer.encode("hell") == [0, TOKENS.index("hell")]
    assert tokenizer.encode("hell", add_special=False) == [TOKENS.index("hell")]
    without = from_hf(tmp_path, add_bos_token=False)
    assert not without.add_bos
    assert without.encode("hell") == [TOKENS.index("hell")]


def test_the_embedded_model_adds_nothing(tokenizer):
    assert tokenizer.encode("") == []
    assert not tokenizer.add_bos
    assert (tokenizer.bos_token_id, tokenizer.eos_token_ids, tokenizer.vocab_size) == (1, {2}, 49152)
    assert tokenizer.is_special(2)
    assert not tokenizer.is_special(100)


def test_control_strings_can_be_plain_text(tokenizer):
    assert tokenizer.encode("<|im_end|>") == [2]
    plain = tokenizer.encode("<|im_end|>", parse_special=False)
    assert len(plain) > 1
    assert not any(map(tokenizer.is_special, plain))
    assert tokenizer.decode(plain) == "<|im_end|>"


@settings(max_examples=150, deadline=None)
@given(
    st.lists(
        st.sampled_from(
            ["<|im_end|>", "<|im_start|>", "<|endoftext|>", "<|im", "_end|>", " ", "a b", "7", "한", "\n"]
        )
    )
)
def test_plain_encoding_equals_a_tokenizer_that_knows_no_control_tokens(tokenizer, parts):
    text = "".join(parts)
    assert tokenizer.encode(text, parse_special=False) == ignorant(tokenizer).encode(text).ids


@cache
def ignorant(tokenizer: Tokenizer) -> tokenizers.Tokenizer:
    """The library's own switch, on a copy, as an oracle."""
    core = copy.deepcopy(tokenizer._core)
    core.encode_special_tokens = True
    return core


def test_a_hidden_mark_cannot_put_a_control_string_together(tokenizer):
    text = f"<{GUARD}|im_end|> and <|im_end|>"
    ids = tokenizer.encode(text, parse_special=False)
    assert tokenizer.decode(ids, skip_special=False) == "<|im_end|> and <|im_end|>"
    assert 2 not in ids


def test_token_bytes_are_exact(tokenizer):
    for text in (MIXED, "ÿþ", "e\u0301"):
        ids = tokenizer.encode(text)
        assert b"".join(map(tokenizer.token_bytes, ids)) == text.encode()
    assert tokenizer.token_bytes(2) == b"<|im_end|>"
    assert tokenizer.token_bytes(60000) == tokenizer.token_bytes(-1) == b""


def test_decode_equals_the_library(tokenizer):
    core = copy.deepcopy(tokenizer._core)
    core.decoder = decoders.ByteLevel()
    ids = [*tokenizer.encode(MIXED), *range(30, 300), *range(0, 49152, 97)]
    for skip in (True, False):
        assert tokenizer.decode(ids, skip) == core.decode(ids, skip_special_tokens=skip)


def test_sentencepiece_bytes_and_guard():
    tokenizer = sentencepiece()
    assert tokenizer.add_bos
    ids = tokenizer.encode("a é")
    assert ids[0] == 1
    assert b"".join(map(tokenizer.token_bytes, ids[1:])) == " a é".encode()
    plain = tokenizer.encode("a<s>a", add_special=False, parse_special=False)
    assert tokenizer.decode(plain) == " a<s>a"
    assert 1 not in plain


def test_half_a_surrogate_pair_is_the_clients_fault(tokenizer):
    with pytest.raises(InvalidParameter, match="Unicode"):
        tokenizer.encode("a\ud800b")


def test_a_truncating_tokenizer_json_does_not_cut_prompts(tmp_path):
    config = tiny_config()
    path = write_hf(tmp_path / "hf", config, random_weights(config))
    core = tokenizers.Tokenizer.from_file(str(path / "tokenizer.json"))
    core.enable_truncation(4)
    core.enable_padding(length=8)
    core.save(str(path / "tokenizer.json"))
    assert len(open_checkpoint(str(path)).load_tokenizer().encode("a" * 50, add_special=False)) == 50


@pytest.mark.parametrize(
    ("content", "told"),
    [
        (None, "no tokenizer.json"),
        ("{", "not valid JSON"),
        ('{"decoder": {"type": "WordPiece"}}', "WordPiece"),
    ],
)
def test_an_unusable_tokenizer_json_is_refused(tmp_path, content, told):
    config = tiny_config()
    path = write_hf(tmp_path / "hf", config, random_weights(config))
    (path / "tokenizer.json").unlink()
    if content is not None:
        (path / "tokenizer.json").write_text(content)
    with pytest.raises(ConfigError, match=told):
        open_checkpoint(str(path)).load_tokenizer()


def test_a_template_file_wins_over_the_settings(tmp_path):
    choices = [{"name": "tool_use", "template": "tools"}, {"name": "default", "template": "plain"}]
    assert from_hf(tmp_path, chat_template=choices).chat_template == "plain"
    (tmp_path / "hf" / "chat_template.jinja").write_text("own file")
    assert open_checkpoint(str(tmp_path / "hf")).load_tokenizer().chat_template == "own file"
