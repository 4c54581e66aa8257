"""What else a user could run: how each peer is found and given the embedded model's weights."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from checkpoint.checkpoint import Checkpoint
from checkpoint.open import embedded_model_path

PROBE_S = 60.0
_PROBE = "import importlib.util as u, sys; print(*[m for m in sys.argv[1:] if u.find_spec(m)])"

VENV_PEERS = {"vllm": "vLLM", "llama_cpp": "llama.cpp"}
"""Module -> name of those that need a virtual environment of their own."""


@dataclass(frozen=True, slots=True)
class Run:
    """One process of a peer. `environment`: added to this process's own."""

    name: str
    number_format: str
    command: list[str]
    environment: dict[str, str]


def write_hf(checkpoint: Checkpoint, folder: Path) -> None:
    """The checkpoint as config.json and model.safetensors, of a Llama without rope scaling."""
    import torch  # here, not above: the process that imports this gives cores and threads to others first
    from safetensors.torch import save_file

    from engine.models.dtype import TORCH_DTYPES

    tensors = {
        raw.name: torch.frombuffer(bytearray(raw.data), dtype=TORCH_DTYPES[raw.dtype]).view(raw.shape)
        for raw in checkpoint.tensors()
    }
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = checkpoint.config
    described = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "rms_norm_eps": config.rms_norm_eps,
        "rope_theta": config.rope_theta,
        "max_position_embeddings": config.max_position,
        "tie_word_embeddings": config.tie_word_embeddings,
        "bos_token_id": config.bos_token_id,
        "eos_token_id": sorted(config.eos_token_ids),
        "torch_dtype": "float32",
    }
    (folder / "config.json").write_text(json.dumps(described, indent=2))


def find(venv: Path) -> list[str]:
    """The modules of VENV_PEERS that this virtual environment has. Raises SystemExit for one that is none."""
    python = venv / "bin" / "python"
    try:
        done = subprocess.run(
            [python, "-c", _PROBE, *VENV_PEERS], capture_output=True, text=True, timeout=PROBE_S, check=True
        )
    except (OSError, subprocess.SubprocessError) as error:
        raise SystemExit(f"--peer-venv {venv} has no Python that runs ({error}); make one there") from None
    return done.stdout.split()


def runs(
    found: Sequence[tuple[Path, str]], formats: Sequence[str], folder: Path, cores: str, seconds: float
) -> Iterator[Run]:
    """transformers of this environment, then what was `found` (virtual environment, module), in each format
    that it has. `folder`: what `write_hf` wrote; `cores`: such as 0,1, for vLLM, which binds its threads."""
    budget = ["--seconds", str(seconds)]
    plain = [number_format for number_format in formats if number_format in ("fp32", "bf16")]
    for number_format in plain:
        command = [*_module(sys.executable, "peer_transformers"), str(folder), "--format", number_format]
        yield Run("transformers", number_format, command + budget, {"HF_HUB_OFFLINE": "1"})
    for venv, module in found:
        python = str(venv / "bin" / "python")
        if module == "llama_cpp":
            path = embedded_model_path()
            command = [*_module(python, "peer_llama_cpp"), str(path), *budget]
            yield Run(VENV_PEERS[module], path.stem.rpartition(".")[2], command, {})
            continue
        binding = {
            "HF_HUB_OFFLINE": "1",
            "VLLM_CPU_KVCACHE_SPACE": "2",  # GiB
            "VLLM_CPU_OMP_THREADS_BIND": cores,
        }
        for number_format in plain:
            command = [*_module(python, "peer_vllm"), str(folder), "--format", number_format, *budget]
            yield Run(VENV_PEERS[module], number_format, command, binding)


def _module(python: str, name: str) -> list[str]:
    return [python, "-m", f"benchmarks.{name}"]
