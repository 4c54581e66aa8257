"""What the rest of the project sees of a model's files, whichever format they have."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from checkpoint.config import ModelConfig
from checkpoint.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class RawTensor:
    """One parameter: `data` is a flat, read-only view of bytes, row-major, little-endian.

    `name` is Hugging Face's, e.g. `model.layers.0.self_attn.q_proj.weight`; `dtype` is fp32, bf16
    or fp16. The view stays valid as long as it lives, also without the checkpoint.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    data: memoryview


class Checkpoint(Protocol):
    """An opened model. Opening has already checked that all parameters are there, once, in shape."""

    path: Path
    name: str
    """Short name to serve it under."""
    config: ModelConfig

    def weights_digest(self) -> str:
        """Hex blake3 over the weight files' bytes. Reads them all: seconds for large models."""
        ...

    @property
    def tokenizer_digest(self) -> str:
        """Hex blake3 over vocabulary, special tokens and chat template; equal in every process."""
        ...

    def load_tokenizer(self) -> Tokenizer:
        """Build the tokenizer. Raises ConfigError when its kind is not supported."""
        ...

    def tensors(self) -> Iterator[RawTensor]:
        """Every parameter of `expected_tensors(config)` once, in that order."""
        ...
