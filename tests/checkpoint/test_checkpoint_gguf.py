"""GGUF files: container, geometry, row order, tokenizer tag (pain F4)."""

from __future__ import annotations

import struct
from dataclasses import replace

import gguf
import numpy as np
import pytest
from checkpoint_models import random_weights, tiny_config, write_gguf, write_hf

from checkpoint.config import RopeScaling
from checkpoint.gguf_config import llama3_divisors
from checkpoint.gguf_file import GGML_TYPES, GGUFFile
from checkpoint.open import open_checkpoint
from checkpoint.parameters import expected_tensors
from core.errors import ConfigError


def as_arrays(checkpoint) -> dict[str, np.ndarray]:
    return {t.name: np.frombuffer(t.data, dtype=np.float32).reshape(t.shape) for t in checkpoint.tensors()}


@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3"])
@pytest.mark.parametrize("tied", [True, False])
def test_gguf_and_safetensors_of_one_model_are_the_same_tensors(tmp_path, tied, architecture):
    """Only llama's q and k are permuted in GGUF."""
    config = tiny_config(tied, architecture)
    weights = random_weights(config)
    from_hf = open_checkpoint(str(write_hf(tmp_path / "hf", config, weights)))
    from_gguf = open_checkpoint(str(write_gguf(tmp_path / "m.gguf", config, weights)))
    assert from_gguf.config == from_hf.config == config
    ours, theirs = as_arrays(from_gguf), as_arrays(from_hf)
    assert list(ours) == list(theirs) == list(expected_tensors(config))
    for name, array in ours.items():
        np.testing.assert_array_equal(array, theirs[name], err_msg=name)


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_1", "BF16", "F16"])
def test_stored_types_come_back_close_and_in_order(tmp_path, kind):
    config = tiny_config()
    weights = random_weights(config)
    path = write_gguf(tmp_path / "m.gguf", config, weights, quantize=gguf.GGMLQuantizationType[kind])
    dtypes = set()
    for tensor in open_checkpoint(str(path)).tensors():
        dtypes.add(tensor.dtype)
        if tensor.dtype == "bf16":
            numbers = (np.frombuffer(tensor.data, np.uint16).astype(np.uint32) << 16).view(np.float32)
        else:
            numbers = np.frombuffer(tensor.data, np.float16 if tensor.dtype == "fp16" else np.float32)
        cosine = np.dot(numbers, weights[tensor.name].ravel().astype(numbers.dtype)).astype(np.float64)
        cosine /= np.linalg.norm(numbers.astype(np.float64)) * np.linalg.norm(weights[tensor.name])
        assert cosine > 0.99, tensor.name
    assert dtypes == {"fp32", {"BF16": "bf16", "F16": "fp16"}.get(kind, "fp32")}


def test_the_embedded_model(embedded):
    config = embedded.config
    assert embedded.name == "SmolLM2-135M-Instruct"
    assert (config.num_layers, config.hidden_size, config.num_heads, config.num_kv_heads) == (30, 576, 9, 3)
    assert (config.head_dim, config.vocab_size, config.max_position) == (64, 49152, 8192)
    assert config.rms_norm_eps == 1e-5
    assert config.rope_description == "default/100000"
    assert config.tie_word_embeddings
    assert config.eos_token_ids == {2}
    first = next(embedded.tensors())
    assert (first.name, first.dtype, first.shape) == ("model.embed_tokens.weight", "fp32", (49152, 576))
    assert first.data.nbytes == 4 * 49152 * 576


def test_reader_agrees_with_the_reference_reader(tmp_path):
    config = tiny_config()
    path = write_gguf(tmp_path / "m.gguf", config, random_weights(config))
    ours, reference = GGUFFile(path), gguf.GGUFReader(path)
    for key, field in reference.fields.items():
        if not key.startswith("GGUF."):
            assert ours.metadata[key] == field.contents(), key
    for tensor, expected in zip(ours.tensors, reference.tensors, strict=True):
        assert (tensor.name, tensor.offset, tensor.nbytes) == (
            expected.name,
            expected.data_offset,
            expected.n_bytes,
        )
        assert tensor.shape == tuple(map(int, reversed(expected.shape)))


def test_block_sizes_agree_with_the_gguf_package():
    for kind, (name, numbers, nbytes) in GGML_TYPES.items():
        reference = gguf.GGMLQuantizationType(kind)
        assert (reference.name, gguf.GGML_QUANT_SIZES[reference]) == (name, (numbers, nbytes))


def test_a_cut_file_is_refused_wherever_it_is_cut(tmp_path):
    config = tiny_config()
    whole = write_gguf(tmp_path / "m.gguf", config, random_weights(config)).read_bytes()
    cut = tmp_path / "cut.gguf"
    for length in [0, 3, 10, 30, 500, 5000, len(whole) // 2, len(whole) - 1]:
        cut.write_bytes(whole[:length])
        with pytest.raises(ConfigError, match=r"cut\.gguf"):
            GGUFFile(cut)


@pytest.mark.parametrize(
    ("head", "told"),
    [(b"version https://git-lfs", "not a GGUF file"), (b"GGUF" + struct.pack("<IQQ", 1, 0, 0), "version 1")],
)
def test_what_is_not_a_gguf_file_is_refused(tmp_path, head, told):
    (tmp_path / "m.gguf").write_bytes(head)
    with pytest.raises(ConfigError, match=told):
        GGUFFile(tmp_path / "m.gguf")


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"architecture": "gemma3"}, "architecture 'gemma3'"),
        ({"metadata": {"split.count": 2}}, "merge the parts"),
        ({"metadata": {"llama.expert_count": 8}}, "expert_count"),
        ({"metadata": {"llama.rope.dimension_count": 4}}, "rope.dimension_count"),
        ({"metadata": {"llama.rope.scaling.type": "longrope"}}, "rope type 'longrope'"),
        (
            {"metadata": {"llama.rope.scaling.type": "yarn", "llama.rope.scaling.yarn_attn_factor": 2}},
            "its own yarn_attn_factor",
        ),
        ({"metadata": {"llama.attention.sliding_window_pattern": 6}}, "sliding_window_pattern"),
        ({"rope_factors": np.linspace(1, 5, 4)}, "llama3 scaling"),
    ],
)
def test_models_that_would_talk_nonsense_are_refused(tmp_path, options, told):
    config = tiny_config()
    path = write_gguf(tmp_path / "m.gguf", config, random_weights(config), **options)
    with pytest.raises(ConfigError, match=told):
        open_checkpoint(str(path))


def test_a_window_is_read_for_llama_and_refused_for_qwen(tmp_path):
    """Mistral's files say llama; which layers of a Qwen have a window, no file says."""
    config = tiny_config()
    metadata = {"llama.attention.sliding_window": 24}
    path = write_gguf(tmp_path / "m.gguf", config, random_weights(config), metadata=metadata)
    assert open_checkpoint(str(path)).config == replace(config, sliding_window=24)
    config = tiny_config(architecture="qwen2")
    metadata = {"qwen2.attention.sliding_window": 24}
    path = write_gguf(tmp_path / "q.gguf", config, random_weights(config), metadata=metadata)
    with pytest.raises(ConfigError, match=r"qwen2\.attention\.sliding_window"):
        open_checkpoint(str(path))


def test_a_type_that_cannot_be_read_is_named(tmp_path):
    config = tiny_config()
    weights = random_weights(config)
    weights["model.norm.weight"] = weights["model.norm.weight"].astype(np.int32)
    path = write_gguf(tmp_path / "m.gguf", config, weights)
    with pytest.raises(ConfigError, match=r"output_norm\.weight has ggml type 26 \(I32\).*Q4_K"):
        open_checkpoint(str(path))


@pytest.mark.parametrize("wrong", ["missing", "extra", "shape"])
def test_wrong_tensors_are_named(tmp_path, wrong):
    config = tiny_config()
    weights = random_weights(config)
    norm = weights.pop("model.layers.1.input_layernorm.weight")
    if wrong == "extra":
        weights |= {"model.layers.1.input_layernorm.weight": norm, "attn_q.bias": norm}
    if wrong == "shape":
        weights["model.layers.1.input_layernorm.weight"] = norm[:-1]
    told = "attn_q.bias" if wrong == "extra" else "layers.1.input_layernorm"
    with pytest.raises(ConfigError, match=told):
        open_checkpoint(str(write_gguf(tmp_path / "m.gguf", config, weights)))


def test_llama3_scaling_is_recovered_from_its_factors(tmp_path):
    config = replace(tiny_config(), rope_theta=500000.0)
    scaling = RopeScaling("llama3", 32.0)
    factors = np.array(llama3_divisors(scaling, config.rope_theta, config.head_dim))
    assert (factors[0], factors[-1]) == (1, 32)
    path = write_gguf(tmp_path / "m.gguf", config, random_weights(config), rope_factors=factors)
    assert open_checkpoint(str(path)).config.rope_scaling == scaling
