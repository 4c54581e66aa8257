"""Llama against a dense decoder, and its weights: converted once, shared, checked."""

from __future__ import annotations

import errno
import json
import math
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch
from filelock import FileLock
from tiny_llama import TinyCheckpoint, dense_logits, layout_of, run_chunks, tiny_config

from checkpoint.config import RopeScaling
from core.errors import ConfigError
from engine.batch import Chunk
from engine.kernels.interface import Kernels
from engine.kv_cache import KVCache
from engine.models.llama import Llama
from engine.models.rope import rope_frequencies, rope_table
from engine.models.weights import load_weights
from engine.runner import ModelRunner

pytest_plugins = ["kernel_sets"]

LLAMA3 = RopeScaling("llama3", 8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position=64)


@pytest.mark.parametrize(
    "config",
    [
        tiny_config(),
        tiny_config(num_kv_heads=4, tie=False),
        tiny_config(num_heads=6, num_kv_heads=2, rope_scaling=RopeScaling("linear", 4.0)),
        tiny_config(num_kv_heads=1, rope_scaling=LLAMA3),
    ],
    ids=["tied", "untied", "linear", "llama3"],
)
def test_logits_equal_a_dense_decoder(kernels: Kernels, config, tmp_path: Path) -> None:
    checkpoint = TinyCheckpoint(config)
    weights = load_weights(checkpoint, "fp32", tmp_path)
    runner = ModelRunner(Llama(config, weights, kernels), KVCache(layout_of(config), 8))
    ids = [(5 * i + 3) % config.vocab_size for i in range(90)]
    got = run_chunks(runner, Chunk(ids, 0, [7, 2, 5, 1, 0, 3], logits_from=0))
    torch.testing.assert_close(
        got, dense_logits(checkpoint, ids, rope_frequencies(config)), rtol=1e-3, atol=1e-3
    )


def test_llama3_scaling_is_the_published_rule() -> None:
    plain = rope_frequencies(tiny_config()).tolist()
    for got, f in zip(rope_frequencies(tiny_config(rope_scaling=LLAMA3)).tolist(), plain, strict=True):
        wavelength = 2 * math.pi / f
        if wavelength < 64 / 4:
            want = f
        elif wavelength > 64 / 1:
            want = f / 8
        else:
            smooth = (64 / wavelength - 1) / (4 - 1)
            want = (1 - smooth) * f / 8 + smooth * f
        assert got == pytest.approx(want, rel=1e-5)
    table = rope_table(tiny_config(), 3)
    assert table.shape == (3, 2, 16)
    assert torch.equal(table[0], torch.stack((torch.ones(16), torch.zeros(16))))


def test_weights_are_fused_and_a_tied_head_is_not_stored_twice(tmp_path: Path) -> None:
    checkpoint = TinyCheckpoint(tiny_config())
    weights = load_weights(checkpoint, "fp32", tmp_path)
    assert "lm_head" not in weights
    parts = [checkpoint.weights[f"model.layers.1.self_attn.{p}_proj.weight"] for p in "qkv"]
    assert torch.equal(weights["layers.1.qkv"], torch.cat(parts))
    parts = [checkpoint.weights[f"model.layers.2.mlp.{p}_proj.weight"] for p in ("gate", "up")]
    assert torch.equal(weights["layers.2.gate_up"], torch.cat(parts))
    half = load_weights(checkpoint, "bf16", tmp_path)
    assert torch.equal(half["layers.0.down"], weights["layers.0.down"].bfloat16())
    assert len(list(tmp_path.glob("*.safetensors"))) == 2


def test_weights_are_converted_once_and_damage_is_repaired(tmp_path: Path) -> None:
    checkpoint, seen = TinyCheckpoint(tiny_config()), []
    loaded = load_weights(checkpoint, "fp32", tmp_path, seen.append)
    want = {name: tensor.clone() for name, tensor in loaded.items()}
    assert seen == sorted(seen)
    assert seen[-1] == 1.0
    load_weights(checkpoint, "fp32", tmp_path)
    assert checkpoint.conversions == 1
    (file,) = tmp_path.glob("*.safetensors")
    for damage in (lambda: os.truncate(file, file.stat().st_size - 1), lambda: file.write_bytes(b"x" * 5000)):
        damage()
        again = load_weights(checkpoint, "fp32", tmp_path)
        assert all(torch.equal(again[name], want[name]) for name in want)
    assert checkpoint.conversions == 3
    assert not list(tmp_path.glob("*.tmp"))


def test_a_missing_or_doubled_tensor_is_refused_and_nothing_is_left(tmp_path: Path) -> None:
    name = "model.layers.1.mlp.up_proj.weight"
    for broken in (TinyCheckpoint(tiny_config(), drop=name), TinyCheckpoint(tiny_config(), twice=name)):
        with pytest.raises(ConfigError, match=name):
            load_weights(broken, "fp32", tmp_path)
    assert not [file for file in tmp_path.iterdir() if file.suffix != ".lock"]


def test_full_disk_and_unwritable_folder_are_sentences(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(ConfigError, match=r"no space left .* free some or set cache_dir elsewhere"):
        load_weights(TinyCheckpoint(tiny_config()), "fp32", tmp_path)
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="set cache_dir to a writable folder"):
        load_weights(TinyCheckpoint(tiny_config()), "fp32", tmp_path / "file" / "below")


def test_waiting_for_another_converter_is_bounded_and_shows_life(tmp_path: Path) -> None:
    checkpoint, seen = TinyCheckpoint(tiny_config()), []
    lock = FileLock(tmp_path / f"{checkpoint.weights_digest()[:32]}-fp32-v1.lock", thread_local=False)
    with lock, pytest.raises(ConfigError, match="another process has been converting"):
        load_weights(checkpoint, "fp32", tmp_path, seen.append, wait_s=1.2)
    assert seen == [0.0]
    lock.acquire()
    threading.Timer(0.3, lock.release).start()
    load_weights(checkpoint, "fp32", tmp_path, wait_s=20)


def test_unknown_architecture_lists_what_is_known(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="'mamba' is not supported; known: llama"):
        load_weights(TinyCheckpoint(tiny_config(architecture="mamba")), "fp32", tmp_path)


SHARE_OF_PAGES = """
import sys, json, torch
from safetensors import safe_open
with safe_open(sys.argv[1], "pt") as f:
    tensors = [f.get_tensor(name) for name in f.keys()]
print(sum(float(t.float().sum()) for t in tensors), flush=True)
sys.stdin.readline()
entry, found = None, {}
for line in open("/proc/self/smaps"):
    if "-" in line.split()[0] and ":" not in line.split()[0]: entry = line
    elif entry and sys.argv[1] in entry and line.startswith(("Rss", "Pss:")):
        found[line.split(":")[0]] = found.get(line.split(":")[0], 0) + int(line.split()[1])
print(json.dumps(found), flush=True)
sys.stdin.readline()
"""


def test_two_processes_share_the_pages(tmp_path: Path) -> None:
    load_weights(TinyCheckpoint(tiny_config()), "fp32", tmp_path)
    (file,) = tmp_path.glob("*.safetensors")
    command = [sys.executable, "-c", SHARE_OF_PAGES, str(file)]
    workers = [
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) for _ in range(2)
    ]
    try:
        for worker in workers:
            worker.stdout.readline()
        for worker in workers:
            worker.stdin.write("\n")
            worker.stdin.flush()
            found = json.loads(worker.stdout.readline())
            assert found["Rss"] > 0
            # Each proportional share is about half: one copy in memory for both.
            assert found["Pss"] <= 0.7 * found["Rss"]
    finally:
        for worker in workers:
            worker.kill()
            worker.communicate()
