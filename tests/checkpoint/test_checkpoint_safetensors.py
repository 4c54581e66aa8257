"""Damaged and incomplete directories are refused by name (pain F1)."""

from __future__ import annotations

import json

import numpy as np
import pytest
from checkpoint_models import random_weights, tiny_config, write_hf, write_safetensors
from safetensors.numpy import save_file

from checkpoint.open import open_checkpoint
from core.errors import ConfigError

SHARD = "model-00002-of-00003.safetensors"
INDEX = "model.safetensors.index.json"


@pytest.fixture
def sharded(tmp_path):
    config = tiny_config()
    return write_hf(tmp_path / "model", config, random_weights(config), num_shards=3)


def refused(path, *told: str) -> None:
    with pytest.raises(ConfigError) as error:
        open_checkpoint(str(path))
    for text in told:
        assert text in error.value.message


def test_three_shards_hold_the_same_as_one_file(sharded, tmp_path):
    config = tiny_config()
    weights = random_weights(config)
    seen = {}
    for tensor in open_checkpoint(str(sharded)).tensors():
        assert tensor.data.readonly
        seen[tensor.name] = np.frombuffer(tensor.data, np.float32).reshape(tensor.shape)
    assert seen.keys() == weights.keys()
    for name, array in seen.items():
        np.testing.assert_array_equal(array, weights[name])


def test_files_of_the_safetensors_library_are_read(tmp_path):
    config = tiny_config()
    weights = {name: array.astype(np.float16) for name, array in random_weights(config).items()}
    path = write_hf(tmp_path / "model", config, weights)
    save_file(weights, path / "model.safetensors")
    for tensor in open_checkpoint(str(path)).tensors():
        assert tensor.dtype == "fp16"
        assert tensor.data.tobytes() == weights[tensor.name].tobytes()


def test_bf16_passes_through_untouched(tmp_path):
    config = tiny_config()
    weights = random_weights(config)
    weights = {name: (array.view(np.uint32) >> 16).astype(np.uint16) for name, array in weights.items()}
    for tensor in open_checkpoint(str(write_hf(tmp_path / "model", config, weights))).tensors():
        assert tensor.dtype == "bf16"
        assert tensor.data.tobytes() == weights[tensor.name].tobytes()


def test_a_deleted_shard_is_named(sharded):
    (sharded / SHARD).unlink()
    refused(sharded, SHARD, "lacks")


@pytest.mark.parametrize("left", [0, 4, 40, -1])
def test_a_truncated_shard_is_named(sharded, left):
    data = (sharded / SHARD).read_bytes()
    (sharded / SHARD).write_bytes(data[:left])
    refused(sharded, SHARD)


def test_a_longer_shard_is_named(sharded):
    with (sharded / SHARD).open("ab") as file:
        file.write(b"\0" * 16)
    refused(sharded, SHARD, "longer")


def test_a_git_lfs_pointer_is_recognised(sharded):
    (sharded / SHARD).write_text("version https://git-lfs.github.com/spec/v1\n")
    refused(sharded, SHARD, "git-lfs")


def test_the_index_is_checked_both_ways(sharded):
    index = json.loads((sharded / INDEX).read_text())
    name = next(name for name, shard in index["weight_map"].items() if shard == SHARD)
    promised = index["weight_map"] | {"model.layers.9.mlp.up_proj.weight": SHARD}
    (sharded / INDEX).write_text(json.dumps({"weight_map": promised}))
    refused(sharded, "promises", "model.layers.9.mlp.up_proj.weight")
    index["weight_map"].pop(name)
    (sharded / INDEX).write_text(json.dumps(index))
    refused(sharded, "does not list", name)


def test_a_parameter_in_two_shards_is_named(sharded):
    name = "model.norm.weight"
    for shard in sharded.glob("model-*.safetensors"):
        write_safetensors(shard, {name: np.ones(32, np.float32)})
    refused(sharded, name, "twice")


def test_stray_shards_and_a_lost_index_are_told_apart(sharded):
    (sharded / "model-00004-of-00004.safetensors").write_bytes((sharded / SHARD).read_bytes())
    refused(sharded, "model-00004-of-00004.safetensors", "does not name")
    (sharded / INDEX).unlink()
    refused(sharded, INDEX)


def test_weights_of_another_kind_are_refused(sharded):
    for file in sharded.glob("model*safetensors*"):
        file.unlink()
    (sharded / "pytorch_model.bin").touch()
    refused(sharded, "model.safetensors")


def test_a_missing_parameter_is_named(tmp_path):
    config = tiny_config()
    weights = random_weights(config)
    del weights["model.layers.1.mlp.down_proj.weight"]
    refused(
        write_hf(tmp_path / "model", config, weights, num_shards=3), "model.layers.1.mlp.down_proj.weight"
    )


def test_an_extra_parameter_and_a_wrong_shape_are_named(tmp_path):
    config = tiny_config()
    bias = {"model.layers.0.self_attn.q_proj.bias": np.zeros(32, np.float32)}
    refused(write_hf(tmp_path / "a", config, random_weights(config) | bias), "q_proj.bias")
    narrow = {"model.norm.weight": np.zeros(31, np.float32)}
    refused(write_hf(tmp_path / "b", config, random_weights(config) | narrow), "model.norm.weight", "[31]")


def test_rotary_buffers_of_old_exports_are_skipped(tmp_path):
    config = tiny_config()
    old = {"model.layers.0.self_attn.rotary_emb.inv_freq": np.zeros(4, np.float32)}
    checkpoint = open_checkpoint(str(write_hf(tmp_path / "a", config, random_weights(config) | old)))
    assert old.keys().isdisjoint(tensor.name for tensor in checkpoint.tensors())
