"""Tokenizer from a Hugging Face directory: tokenizer.json and the small files around it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import orjson
import tokenizers
from blake3 import blake3
from tokenizers import processors

from checkpoint.token_bytes import byte_level_bytes, sentencepiece_bytes
from checkpoint.tokenizer import SpecialTokens, Tokenizer
from core.errors import ConfigError

TOKENIZER, SETTINGS, TEMPLATE = "tokenizer.json", "tokenizer_config.json", "chat_template.jinja"
_NAMED = ("bos_token", "eos_token", "unk_token", "pad_token")


def read_json(path: Path, optional: bool = False) -> dict[str, Any]:
    """A JSON object; {} when absent and optional. Raises ConfigError."""
    if optional and not path.is_file():
        return {}
    try:
        content = orjson.loads(path.read_bytes())
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}; get the model's files again") from None
    except orjson.JSONDecodeError as error:
        raise ConfigError(f"{path} is not valid JSON ({error}); get the file again") from None
    if not isinstance(content, dict):
        raise ConfigError(f"{path} does not hold a JSON object; get the file again")
    return content


@dataclass(frozen=True)
class HFTokenizerFiles:
    """What a directory says about its tokenizer, before the tokenizer itself is built."""

    path: Path

    @cached_property
    def definition(self) -> dict[str, Any]:
        """Content of tokenizer.json."""
        if not (self.path / TOKENIZER).is_file():
            raise ConfigError(
                f"{self.path} has no {TOKENIZER}; export the model's fast tokenizer into it "
                f"(AutoTokenizer.from_pretrained(...).save_pretrained(...))"
            )
        return read_json(self.path / TOKENIZER)

    @cached_property
    def settings(self) -> dict[str, Any]:
        """Content of tokenizer_config.json, {} when absent."""
        return read_json(self.path / SETTINGS, optional=True)

    @cached_property
    def chat_template(self) -> str | None:
        """The default chat template; a file of its own wins over tokenizer_config.json."""
        file = self.path / TEMPLATE
        if file.is_file():
            try:
                return file.read_text(encoding="utf-8")
            except (OSError, UnicodeDecodeError) as error:
                raise ConfigError(f"cannot read {file}: {error}; get the file again") from None
        template = self.settings.get("chat_template")
        if isinstance(template, list):
            template = {entry.get("name"): entry.get("template") for entry in template}.get("default")
        return template

    @cached_property
    def literals(self) -> dict[str, str]:
        """`{"bos_token": "<s>", ...}` as tokenizer_config.json names them."""
        return {name: literal for name in _NAMED if (literal := self._literal(name))}

    def _literal(self, name: str) -> str | None:
        value = self.settings.get(name)
        return value.get("content") if isinstance(value, dict) else value

    def special_id(self, name: str) -> int | None:
        """Id of e.g. `eos_token`, None when it is not named or not in the vocabulary."""
        literal = self.literals.get(name)
        for token in self.definition.get("added_tokens", ()):
            if token["content"] == literal:
                return token["id"]
        vocab = self.definition.get("model", {}).get("vocab")
        return vocab.get(literal) if isinstance(vocab, dict) else None

    def digest(self) -> str:
        """Hex blake3 over the definition, the special tokens and the template, independent of layout."""
        parts = {
            "definition": self.definition,
            "literals": self.literals,
            "add_bos_token": self.settings.get("add_bos_token"),
            "chat_template": self.chat_template,
        }
        return blake3(orjson.dumps(parts, option=orjson.OPT_SORT_KEYS)).hexdigest()


def tokenizer_from_hf(
    files: HFTokenizerFiles, bos_token_id: int | None, eos_token_ids: frozenset[int]
) -> Tokenizer:
    """Build the tokenizer; the ids are the model config's. Raises ConfigError."""
    to_bytes = _bytes_rule(files)
    try:
        core = tokenizers.Tokenizer.from_file(str(files.path / TOKENIZER))
    except Exception as error:  # the library raises bare Exception for everything
        raise ConfigError(
            f"cannot use {files.path / TOKENIZER}: {error}; get the file again or update `tokenizers`"
        ) from None
    bos = files.special_id("bos_token")
    bos = bos_token_id if bos is None else bos
    _obey_add_bos(core, files.settings.get("add_bos_token"), bos)
    literals = dict(files.literals)
    if bos is not None and (token := core.id_to_token(bos)) is not None:
        literals.setdefault("bos_token", token)
    return Tokenizer(core, to_bytes, SpecialTokens(bos, eos_token_ids, literals), files.chat_template)


def _obey_add_bos(core: tokenizers.Tokenizer, wanted: object, bos: int | None) -> None:
    """An explicit `add_bos_token` wins over tokenizer.json, which some exports leave out of step."""
    token = core.id_to_token(bos) if bos is not None else None
    if not isinstance(wanted, bool) or bos is None or token is None:
        return
    if (core.encode("", add_special_tokens=True).ids[:1] == [bos]) != wanted:
        template = [token, "$A"] if wanted else ["$A"]
        core.post_processor = processors.TemplateProcessing(single=template, special_tokens=[(token, bos)])


def _bytes_rule(files: HFTokenizerFiles) -> Callable[[str], bytes]:
    """Which alphabet the vocabulary is written in, told by the decoder."""
    kinds = list(_kinds(files.definition.get("decoder") or {}))
    if "ByteLevel" in kinds:
        return byte_level_bytes
    if "ByteFallback" in kinds or "Metaspace" in kinds:
        return sentencepiece_bytes
    raise ConfigError(
        f"{files.path / TOKENIZER} has decoder {', '.join(kinds) or 'none'}, supported are ByteLevel, "
        f"ByteFallback and Metaspace; choose another model"
    )


def _kinds(decoder: Mapping[str, Any]) -> Iterator[str]:
    yield str(decoder.get("type"))
    for part in decoder.get("decoders", ()):
        yield from _kinds(part)
