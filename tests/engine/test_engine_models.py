"""Every supported architecture and rope scaling against transformers, from both file formats.

The only tests that import transformers: it takes seconds.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers
import torch
from gguf import GGMLQuantizationType as Kind
from gguf_twin import write_gguf_twin
from tiny_llama import layout_of
from tokenizers import decoders, models
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from checkpoint.checkpoint import Checkpoint
from checkpoint.open import open_checkpoint
from core.request import Request, SamplingParams
from engine.batch import Batch, Chunk
from engine.block_pool import BlockPool
from engine.engine import Engine
from engine.kernels.interface import Kernels
from engine.kernels.torch_kernels import TorchKernels
from engine.kv_cache import KVCache
from engine.messages import Add
from engine.models.registry import model_class
from engine.models.weights import load_weights
from engine.runner import ModelRunner
from engine.scheduler import Scheduler
from engine.step import Limits

pytest_plugins = ["kernel_sets"]

KernelsFor = Callable[[int], Kernels]
"""A kernel set for a sliding window in tokens."""

LENGTH, BLOCK, WINDOW, VOCAB = 90, 16, 24, 256
IDS = [(37 * i + i * i // 3) % VOCAB for i in range(LENGTH)]
CHUNKINGS = {
    "one shot": [90],
    "by token": [1] * 90,
    "prefill, then decode": [23] + [1] * 67,
    "by block": [16] * 5 + [10],
    "across blocks": [7] * 12 + [6],
    "across windows": [31, 31, 28],
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
CLASSES = {
    "llama": (LlamaConfig, LlamaForCausalLM),
    "mistral": (MistralConfig, MistralForCausalLM),
    "qwen2": (Qwen2Config, Qwen2ForCausalLM),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM),
}


@dataclass(frozen=True)
class Variant:
    """One model: transformers' settings, and what a GGUF file of it says beyond the geometry."""

    kind: str
    settings: dict[str, Any] = field(default_factory=dict)
    metadata: dict[str, int | float | str] = field(default_factory=dict)


def rope(theta: float = 10000.0, **scaling: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_theta": theta, "rope_type": "default", **scaling}}


ALL_WINDOWED = {"use_sliding_window": True, "max_window_layers": 0, "sliding_window": WINDOW}
YARN_KEYS = {
    "rope.scaling.type": "yarn",
    "rope.scaling.factor": 4.0,
    "rope.scaling.original_context_length": 64,
}
VARIANTS = {
    "llama": Variant("llama"),
    "llama-mha-tied": Variant("llama", {"num_key_value_heads": 4, "tie_word_embeddings": True}),
    "llama-head-dim": Variant("llama", {"head_dim": 64}),
    "llama-linear": Variant(
        "llama",
        rope(rope_type="linear", factor=4.0),
        {"rope.scaling.type": "linear", "rope.scaling.factor": 4.0},
    ),
    "llama-llama3": Variant("llama", rope(500000.0, **LLAMA3)),
    "mistral": Variant("mistral", {"sliding_window": None}),
    "mistral-window": Variant("mistral", {"sliding_window": WINDOW}, {"attention.sliding_window": WINDOW}),
    "qwen2": Variant("qwen2", rope(1e6)),
    "qwen2-yarn-tied": Variant("qwen2", {**rope(1e6, **YARN), "tie_word_embeddings": True}, YARN_KEYS),
    "qwen2-window": Variant("qwen2", ALL_WINDOWED),
    "qwen3": Variant("qwen3", {**rope(1e6), "head_dim": 64}),
    "qwen3-yarn-tied": Variant(
        "qwen3", {**rope(1e6, **YARN), "head_dim": 32, "tie_word_embeddings": True}, YARN_KEYS
    ),
    "qwen3-window": Variant("qwen3", {**ALL_WINDOWED, "head_dim": 64}),
}
HF_ONLY = {"llama-llama3", "qwen2-window", "qwen3-window"}
"""llama3 scaling is stored as divisors (tests/checkpoint); a window of Qwen's cannot be told in GGUF."""


@dataclass(frozen=True)
class Reference:
    """A random transformers model, its files and its logits [LENGTH, VOCAB] for IDS."""

    name: str
    model: Any
    folder: Path
    logits: torch.Tensor


def make_model(variant: Variant, hidden: int = 128) -> Any:
    config_class, model_class = CLASSES[variant.kind]
    settings = {
        "vocab_size": VOCAB,
        "hidden_size": hidden,
        "intermediate_size": hidden,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 256,
        "tie_word_embeddings": False,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": None,
        **rope(),
        **variant.settings,
    }
    model = model_class(config_class(**settings, attn_implementation="eager")).eval()
    generator = torch.Generator().manual_seed(len(variant.kind) + hidden)
    with torch.no_grad():
        for parameter in model.parameters():  # far from the initial values, or norms and biases hide
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(noise * 1.5 * hidden**-0.5 if parameter.dim() > 1 else 0.8 + noise * 0.4)
    return model


def tensors_of(model: Any) -> dict[str, np.ndarray]:
    tied = model.config.tie_word_embeddings
    return {n: t.numpy() for n, t in model.state_dict().items() if not (tied and n == "lm_head.weight")}


@torch.no_grad()
def logits_of(model: Any) -> torch.Tensor:
    return model(torch.tensor([IDS])).logits[0]


def save(model: Any, folder: Path, shard_nbytes: int = 2**30) -> Path:
    model.save_pretrained(folder, max_shard_size=shard_nbytes)
    core = tokenizers.Tokenizer(models.BPE({chr(0x100 + i): i for i in range(VOCAB)}, []))
    core.decoder = decoders.ByteLevel()
    core.save(str(folder / "tokenizer.json"))
    return folder


@pytest.fixture(scope="module", params=list(VARIANTS))
def reference(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Reference:
    model = make_model(VARIANTS[request.param])
    return Reference(
        request.param, model, save(model, tmp_path_factory.mktemp(request.param)), logits_of(model)
    )


def runner_of(
    checkpoint: Checkpoint, kernels_for: KernelsFor, folder: Path, dtype: str = "fp32"
) -> ModelRunner:
    """Every slot of its pool is poisoned."""
    config = checkpoint.config
    kernels = kernels_for(config.sliding_window)
    weights = load_weights(checkpoint, dtype, folder)
    cache = KVCache(layout_of(config, BLOCK, dtype), 16)
    cache.pool.fill_(float("nan"))
    return ModelRunner(model_class(config.architecture)(config, weights, kernels), cache)


def our_logits(runner: ModelRunner, sizes: list[int]) -> torch.Tensor:
    """Logits of every position. Blocks that fell out of the window are poisoned, as if taken by others."""
    found, start, table = [], 0, [7, 2, 5, 1, 0, 3]
    window = runner.model.config.sliding_window
    for size in sizes:
        chunk = Chunk(IDS[start : start + size], start, table, 0)
        found.append(runner.run(Batch.build([chunk], BLOCK)))
        start += size
        if window:
            for fallen in table[: max(0, start + 1 - window) // BLOCK]:
                runner.cache.pool[fallen] = float("nan")
    return torch.cat(found)


def test_logits_equal_transformers(reference: Reference, kernels_for: KernelsFor, tmp_path: Path) -> None:
    """At every length up to 90, across the borders of blocks and windows, however it is chunked."""
    runner = runner_of(open_checkpoint(str(reference.folder)), kernels_for, tmp_path)
    for chunking, sizes in CHUNKINGS.items():
        runner.cache.pool.fill_(float("nan"))
        got = our_logits(runner, sizes)
        torch.testing.assert_close(got, reference.logits, rtol=0, atol=1e-4, msg=chunking)


@pytest.mark.parametrize("name", ["llama", "qwen2", "qwen3"])
def test_shards_change_nothing(name: str, tmp_path: Path) -> None:
    model = make_model(VARIANTS[name])
    whole = open_checkpoint(str(save(model, tmp_path / "one")))
    shards = open_checkpoint(str(save(model, tmp_path / "some", shard_nbytes=500_000)))
    assert len(list((tmp_path / "some").glob("model-*-of-*.safetensors"))) >= 3
    assert shards.config == whole.config
    pairs = zip(whole.tensors(), shards.tensors(), strict=True)
    assert all((a.name, a.shape, bytes(a.data)) == (b.name, b.shape, bytes(b.data)) for a, b in pairs)


@pytest.mark.parametrize("reference", [name for name in VARIANTS if name not in HF_ONLY], indirect=True)
def test_gguf_of_the_same_weights(reference: Reference, kernels_for: KernelsFor, tmp_path: Path) -> None:
    path, metadata = tmp_path / "m.gguf", VARIANTS[reference.name].metadata
    write_gguf_twin(path, reference.model.config, tensors_of(reference.model), metadata=metadata)
    checkpoint = open_checkpoint(str(path))
    assert checkpoint.config == open_checkpoint(str(reference.folder)).config
    got = our_logits(runner_of(checkpoint, kernels_for, tmp_path), CHUNKINGS["across windows"])
    torch.testing.assert_close(got, reference.logits, rtol=0, atol=1e-4)


@pytest.mark.parametrize("kind", ["F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q4_K", "Q6_K"])
@pytest.mark.parametrize("name", ["llama", "qwen2"])
def test_gguf_types(name: str, kind: str, tmp_path: Path) -> None:
    """What transformers computes with the dequantized numbers. Rows of llama's q and k are permuted."""
    model = make_model(VARIANTS[name], hidden=256)
    stored = write_gguf_twin(tmp_path / "m.gguf", model.config, tensors_of(model), Kind[kind])
    model.load_state_dict({name: torch.from_numpy(tensor) for name, tensor in stored.items()})
    runner = runner_of(open_checkpoint(str(tmp_path / "m.gguf")), TorchKernels, tmp_path)
    torch.testing.assert_close(our_logits(runner, [50, 40]), logits_of(model), rtol=0, atol=1e-4)


@pytest.mark.parametrize("name", ["llama", "qwen2", "qwen3"])
def test_bf16_is_nearly_the_same(name: str, kernels_for: KernelsFor, tmp_path: Path) -> None:
    model = make_model(VARIANTS[name])
    runner = runner_of(open_checkpoint(str(save(model, tmp_path / "m"))), kernels_for, tmp_path, "bf16")
    want = logits_of(model)
    assert (our_logits(runner, CHUNKINGS["across windows"]) - want).norm() < 0.05 * want.norm()


@pytest.mark.parametrize("name", ["mistral-window", "qwen3-window"])
def test_an_engine_with_a_window_generates_what_transformers_does(
    name: str, kernels_for: KernelsFor, tmp_path: Path
) -> None:
    """Greedy, in a pool where fallen blocks are needed: four answers of 150 tokens in 20 blocks of 16."""
    model = make_model(VARIANTS[name])
    runner = runner_of(open_checkpoint(str(save(model, tmp_path / "m"))), kernels_for, tmp_path)
    runner.cache = KVCache(layout_of(runner.model.config, BLOCK), 20)
    pool, limits = BlockPool(20), Limits(BLOCK, 256, 8, 40, 100, WINDOW)
    events: list[Any] = []
    engine = Engine(Scheduler(pool, limits, b"namespace"), runner, events.extend)
    prompts = {f"r{i}": tuple(IDS[5 * i : 5 * i + 40 + i]) for i in range(4)}
    for request_id, prompt in prompts.items():
        params = SamplingParams(max_tokens=150, seed=0, temperature=0.0)
        engine.handle(Add(Request(request_id, prompt, params)))
    while engine.step():
        pool.check()
    assert pool.num_free == 20
    assert engine.stats().preemptions == 0
    for request_id, prompt in prompts.items():
        got = [t for e in events if e.request_id == request_id for t in e.token_ids]
        assert len(got) == 150
        check_greedy(model, prompt, got)


def check_greedy(model: Any, prompt: tuple[int, ...], answer: list[int]) -> None:
    """Each token is transformers' best one, or all but tied with it."""
    with torch.no_grad():
        logits = model(torch.tensor([[*prompt, *answer]])).logits[0, len(prompt) - 1 : -1]
    chosen = logits.gather(1, torch.tensor(answer).unsqueeze(1)).squeeze(1)
    assert (logits.amax(1) - chosen).max() < 1e-3
