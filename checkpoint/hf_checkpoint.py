"""A Hugging Face directory as a checkpoint."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from checkpoint.checkpoint import RawTensor
from checkpoint.digest import files_digest
from checkpoint.hf_config import config_from_hf
from checkpoint.hf_tokenizer import HFTokenizerFiles, read_json, tokenizer_from_hf
from checkpoint.parameters import expected_tensors, verify_tensors
from checkpoint.safetensors_dir import SafetensorsDir
from checkpoint.tokenizer import Tokenizer

CONFIG, GENERATION = "config.json", "generation_config.json"


class HFCheckpoint:
    """config.json, safetensors weights and tokenizer.json. Raises ConfigError for unusable files."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.name = _served_name(path)
        self._tokenizer_files = HFTokenizerFiles(path)
        eos = self._tokenizer_files.special_id("eos_token")
        self.config = config_from_hf(
            read_json(path / CONFIG),
            read_json(path / GENERATION, optional=True),
            tokenizer_eos=() if eos is None else (eos,),
        )
        self._weights = SafetensorsDir(path)
        shapes = {tensor.name: tensor.shape for tensor in self._weights.tensors.values()}
        verify_tensors(self.config, shapes, path)

    def weights_digest(self) -> str:
        return files_digest([*self._weights.shards, self.path / CONFIG])

    @property
    def tokenizer_digest(self) -> str:
        return self._tokenizer_files.digest()

    def load_tokenizer(self) -> Tokenizer:
        return tokenizer_from_hf(self._tokenizer_files, self.config.bos_token_id, self.config.eos_token_ids)

    def tensors(self) -> Iterator[RawTensor]:
        for name in expected_tensors(self.config):
            stored = self._weights.tensors[name]
            yield RawTensor(name, stored.dtype, stored.shape, self._weights.tensor_bytes(stored))


def _served_name(path: Path) -> str:
    """The directory's name; in a hub cache (`models--org--name/snapshots/<hash>`) the model's."""
    resolved = path.resolve()
    if resolved.parent.name == "snapshots":
        return resolved.parent.parent.name.rpartition("--")[2]
    return resolved.name
