"""config.json: geometry, rope, ties (pain F2), the set of EOS ids (pain F5), refusals."""

from __future__ import annotations

import json

import numpy as np
import pytest
from checkpoint_models import random_weights, tiny_config, write_hf

from checkpoint.config import RopeScaling
from checkpoint.hf_config import config_from_hf
from checkpoint.open import open_checkpoint
from core.errors import ConfigError

BASE = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 100,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
QWEN = {"architectures": ["Qwen2ForCausalLM"], "sliding_window": 512}


def read(**changes):
    return config_from_hf(BASE | changes, {}, ())


def test_defaults_are_those_of_llama():
    config = read()
    assert (config.num_kv_heads, config.head_dim, config.rms_norm_eps) == (4, 8, 1e-6)
    assert (config.rope_theta, config.rope_scaling, config.tie_word_embeddings) == (10000.0, None, False)


@pytest.mark.parametrize(
    ("changes", "described"),
    [
        ({"rope_theta": 500000.0, "rope_scaling": LLAMA3}, "llama3:8:1:4:8192/500000"),
        ({"rope_parameters": LLAMA3 | {"rope_theta": 500000.0}}, "llama3:8:1:4:8192/500000"),
        ({"rope_scaling": {"type": "linear", "factor": 2.5}}, "linear:2.5/10000"),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}, "default/1000000"),
        ({"rope_scaling": None, "rope_theta": 100000}, "default/100000"),
        (
            {"sliding_window": 512, "use_sliding_window": True, "max_window_layers": 0},
            "default/10000/window:512",
        ),
        ({"rope_scaling": YARN, "rope_theta": 1e6}, "yarn:4:32:1:32768:1.138629436/1000000"),
        ({"rope_parameters": YARN | {"attention_factor": 1.5}}, "yarn:4:32:1:32768:1.5/10000"),
    ],
)
def test_rope_is_read_from_old_and_new_keys(changes, described):
    assert read(**changes).rope_description == described


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"architectures": ["Gemma3ForCausalLM"]}, "Gemma3ForCausalLM"),
        ({"architectures": None, "model_type": "mamba"}, "mamba"),
        ({"rope_scaling": {"rope_type": "longrope", "factor": 4}}, "'longrope'.*yarn"),
        ({"rope_scaling": {"rope_type": "yarn"}}, "'yarn' lacks 'factor'"),
        ({"rope_scaling": YARN | {"truncate": False}}, "truncate = False"),
        ({"rope_scaling": YARN | {"mscale": 0.7}}, "mscale = 0.7"),
        ({"rope_scaling": YARN | {"beta_fast": 0.5}}, "beta_fast"),
        ({"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}}, "partial_rotary"),
        ({"rope_parameters": {"full_attention": {"rope_theta": 1e6}}}, "full_attention"),
        ({"rope_scaling": {"type": "dynamic", "factor": 4}}, "'dynamic'"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 4}}, "low_freq_factor"),
        ({"rope_scaling": LLAMA3 | {"low_freq_factor": 4.0}}, "low_freq_factor"),
        ({"hidden_act": "gelu"}, "gelu"),
        ({"attention_bias": True}, "attention_bias"),
        ({"quantization_config": {"quant_method": "awq"}}, "quantization_config"),
        ({"num_hidden_layers": None}, "num_hidden_layers"),
        ({"num_hidden_layers": 0}, "num_layers"),
        ({"num_key_value_heads": 3}, "3 KV heads"),
        ({"head_dim": 7}, "head_dim 7"),
    ],
)
def test_what_is_not_supported_is_named(changes, told):
    with pytest.raises(ConfigError, match=told) as error:
        read(**changes)
    assert any(verb in error.value.message for verb in ("choose", "get", "fix"))


@pytest.mark.parametrize(
    ("changes", "window"),
    [
        ({"sliding_window": 512}, 0),
        ({"architectures": ["MistralForCausalLM"]}, 4096),
        ({"architectures": ["MistralForCausalLM"], "sliding_window": 512}, 512),
        ({"architectures": ["MistralForCausalLM"], "sliding_window": None}, 0),
        (QWEN, 0),
        (QWEN | {"use_sliding_window": True, "max_window_layers": 2}, 0),
        (QWEN | {"use_sliding_window": True, "max_window_layers": 28}, 0),
        (QWEN | {"use_sliding_window": True, "max_window_layers": 0}, 512),
        (QWEN | {"use_sliding_window": True, "layer_types": ["sliding_attention"] * 2}, 512),
        (QWEN | {"use_sliding_window": True, "layer_types": ["full_attention"] * 2}, 0),
    ],
)
def test_the_window_is_the_one_that_transformers_would_use(changes, window):
    assert read(num_key_value_heads=2, **changes).sliding_window == window


@pytest.mark.parametrize(
    "layers", [{"max_window_layers": 1}, {"layer_types": ["full_attention", "sliding_attention"]}]
)
def test_a_window_on_some_layers_is_refused(layers):
    with pytest.raises(ConfigError, match="sliding window on 1 of 2 layers"):
        read(**QWEN, num_key_value_heads=2, use_sliding_window=True, **layers)


def test_families_differ_by_facts_and_by_defaults():
    """transformers' defaults for keys that a config.json does not write."""
    config = read(architectures=["Qwen3ForCausalLM"], num_attention_heads=32)
    assert (config.head_dim, config.num_kv_heads, config.max_position) == (128, 32, 32768)
    assert (config.qkv_bias, config.head_norm) == (False, True)
    config = read(architectures=["Qwen2ForCausalLM"], num_key_value_heads=2)
    assert (config.head_dim, config.qkv_bias, config.head_norm) == (8, True, False)
    config = read(architectures=["MistralForCausalLM"], num_attention_heads=8)
    assert (config.architecture, config.num_kv_heads, config.max_position) == ("llama", 8, 131072)


def test_yarn_that_was_added_to_a_config_reaches_beyond_its_trained_context():
    config = read(architectures=["Qwen2ForCausalLM"], num_key_value_heads=2, rope_scaling=YARN)
    assert config.max_position == 131072
    assert read(max_position_embeddings=200000, rope_scaling=YARN).max_position == 200000


def test_scaling_is_a_value():
    assert read(rope_scaling=LLAMA3).rope_scaling == RopeScaling("llama3", 8.0, 1.0, 4.0, 8192)


def test_a_tied_model_ignores_a_redundant_lm_head(tmp_path):
    config = tiny_config(tied=True)
    weights = random_weights(config) | {"lm_head.weight": np.zeros((config.vocab_size, 32), np.float32)}
    checkpoint = open_checkpoint(str(write_hf(tmp_path / "m", config, weights)))
    assert "lm_head.weight" not in {tensor.name for tensor in checkpoint.tensors()}


def test_an_untied_model_without_lm_head_is_refused(tmp_path):
    config = tiny_config(tied=True)
    path = write_hf(tmp_path / "m", config, random_weights(config), overrides={"tie_word_embeddings": False})
    with pytest.raises(ConfigError, match=r"lm_head\.weight.*tie_word_embeddings"):
        open_checkpoint(str(path))


def test_eos_is_the_union_of_tokenizer_config_and_generation_config(tmp_path):
    """1: config.json, 2 and 0: generation_config.json, 3: the tokenizer's eos_token."""
    config = tiny_config()
    path = write_hf(tmp_path / "m", config, random_weights(config))
    (path / "generation_config.json").write_text(json.dumps({"eos_token_id": [0, 2]}))
    (path / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|im_end|>"}))
    checkpoint = open_checkpoint(str(path))
    assert checkpoint.config.eos_token_ids == {0, 1, 2, 3}
    assert checkpoint.load_tokenizer().eos_token_ids == {0, 1, 2, 3}
