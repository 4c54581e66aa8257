"""Which class runs which architecture."""

from __future__ import annotations

from core.errors import ConfigError
from engine.models.llama import Llama

MODELS: dict[str, type[Llama]] = {"llama": Llama, "qwen2": Llama, "qwen3": Llama}
"""Keys are `ModelConfig.architecture`: one name for GGUF and Hugging Face checkpoints (Mistral
is llama)."""


def model_class(architecture: str) -> type[Llama]:
    """Raises ConfigError, listing what is known, for an architecture that no class runs."""
    try:
        return MODELS[architecture]
    except KeyError:
        raise ConfigError(
            f"architecture {architecture!r} is not supported; known: {', '.join(sorted(MODELS))}"
        ) from None
