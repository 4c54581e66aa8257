"""`benchmarks.engine`: what it makes of the processes that it starts, and the weights that it gives to peers."""

from __future__ import annotations

import os
import random
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from tiny_llama import TinyCheckpoint, dense_logits, tiny_config
from transformers import AutoModelForCausalLM

from benchmarks import cells, engine, peers
from benchmarks.peer_llama_cpp import LlamaCppEngine
from benchmarks.peer_transformers import TransformersEngine
from benchmarks.peer_vllm import STEPS, VLLMEngine
from engine.models.rope import rope_frequencies


def measure(script: str, limit_s: float = 30.0) -> dict[str, float]:
    return engine.measure([sys.executable, "-c", script], os.environ, limit_s)


def test_cells_are_read_between_what_libraries_print():
    script = """if True:
        from benchmarks import cells
        print("loading 30%"); print("[1, 2]"); print(7)
        cells.say_ready()
        cells.say(cell="prefill 200", value=5.0)
    """
    said = measure(script)
    assert said["prefill 200"] == 5.0
    assert 0 < said["start_s"] < 30
    assert said["rss_nbytes"] > 2**20
    assert set(said) == {"prefill 200", "start_s", "rss_nbytes"}


def test_a_failed_process_keeps_its_cells_and_shows_why(capfd: pytest.CaptureFixture[str]):
    said = measure(
        """print('{"cell": "prefill 200", "value": 5}', flush=True); raise SystemExit("no memory")"""
    )
    assert said == {"prefill 200": 5}
    assert "no memory" in capfd.readouterr().err


def test_a_process_over_its_time_is_ended_with_its_children(capfd: pytest.CaptureFixture[str]):
    script = """if True:
        import subprocess, sys
        subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"]).wait()
    """
    assert measure(script, limit_s=1.0) == {}  # the grandchild holds our pipe: this returns only if it ended
    assert "status -9" in capfd.readouterr().err


def test_resident_memory_counts_children():
    script = """if True:
        import subprocess, sys
        from benchmarks import cells
        child = subprocess.Popen([sys.executable, "-c", "x = bytes(range(256)) * 2**18; print(flush=True); input()"],
                                 stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        child.stdout.readline()
        cells.say(cell="with", value=cells.rss_nbytes())
        child.communicate(b"end")
        child.wait()
        cells.say(cell="without", value=cells.rss_nbytes())
    """
    said = measure(script)
    assert said["with"] - said["without"] > 2**26


FAKES = """if True:
    class SamplingParams:
        def __init__(self, temperature, max_tokens, ignore_eos, detokenize):
            self.max_tokens = max_tokens

    class LLM:
        asked = []
        def __init__(self, **given):
            pass
        def generate(self, inputs, sampling, use_tqdm):
            LLM.asked.append((len(inputs), len(inputs[0]["prompt_token_ids"]), sampling.max_tokens))

    class Llama:
        evaluated = []
        def __init__(self, **given):
            self.n_tokens = 0
        def reset(self):
            self.n_tokens = 0
        def eval(self, ids):
            Llama.evaluated.append((self.n_tokens, len(ids)))
            self.n_tokens += len(ids)
"""
"""As much of vllm and llama_cpp as is used."""


def fake_venv(folder: Path, *modules: str) -> Path:
    """A virtual environment whose Python is ours and has these modules, faked."""
    (folder / "bin").mkdir(parents=True)
    (folder / "site").mkdir()
    for module in modules:
        (folder / "site" / f"{module}.py").write_text(FAKES)
    python = folder / "bin" / "python"
    python.write_text(f'#!/bin/sh\nPYTHONPATH={folder}/site exec {sys.executable} "$@"\n')
    python.chmod(0o755)
    return folder


def test_peers_of_a_virtual_environment(tmp_path: Path):
    assert peers.find(fake_venv(tmp_path / "a", "vllm")) == ["vllm"]
    assert peers.find(fake_venv(tmp_path / "b", "llama_cpp", "vllm")) == ["vllm", "llama_cpp"]
    assert peers.find(fake_venv(tmp_path / "c")) == []
    with pytest.raises(SystemExit, match="no Python"):
        peers.find(tmp_path / "d")


def test_each_peer_runs_in_the_formats_it_has(tmp_path: Path):
    found = [(tmp_path / "a", "vllm"), (tmp_path / "b", "llama_cpp")]
    runs = list(peers.runs(found, ["fp32", "bf16", "bf16+int8"], tmp_path / "hf", "0,1", 2.0))
    assert [(run.name, run.number_format) for run in runs] == [
        ("transformers", "fp32"), ("transformers", "bf16"), ("vLLM", "fp32"), ("vLLM", "bf16"), ("llama.cpp", "Q4_1"),
    ]  # fmt: skip
    assert runs[2].command[0] == str(tmp_path / "a" / "bin" / "python")
    assert runs[2].environment["VLLM_CPU_OMP_THREADS_BIND"] == "0,1"


def test_transformers_computes_the_same_model(tmp_path: Path):
    config = tiny_config(num_heads=4, num_kv_heads=2)
    checkpoint = TinyCheckpoint(config)
    peers.write_hf(checkpoint, tmp_path)
    model = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    ids = random.Random(0).choices(range(config.vocab_size), k=40)
    with torch.inference_mode():
        got = model(input_ids=torch.tensor([ids])).logits[0]
    torch.testing.assert_close(
        got, dense_logits(checkpoint, ids, rope_frequencies(config)), rtol=1e-3, atol=1e-3
    )


def test_transformers_steps_do_not_lengthen_the_context(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    peers.write_hf(TinyCheckpoint(tiny_config()), tmp_path)
    measured = TransformersEngine(str(tmp_path), "fp32")
    lengths: list[int] = []
    model = measured._model

    def step(past_key_values, input_ids, use_cache):
        lengths.append(past_key_values.get_seq_length())
        model(input_ids=input_ids % 97, past_key_values=past_key_values, use_cache=use_cache)

    step.config = model.config
    monkeypatch.setattr(measured, "_model", step)
    measured.decode_s(2, 24, 0.0)
    assert lengths == [24, 24]


@pytest.fixture
def fakes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for module in peers.VENV_PEERS:
        (tmp_path / f"{module}.py").write_text(FAKES)
    monkeypatch.syspath_prepend(tmp_path)
    yield
    for module in peers.VENV_PEERS:
        sys.modules.pop(module, None)


def test_vllm_is_asked_for_one_and_for_many_tokens(fakes: None):
    measured = VLLMEngine("folder", "bf16")
    measured.decode_s(8, 256, 0.0)
    assert measured._llm.asked == [(1, 256, 1)] + [(8, 256, 1)] * 2 + [(8, 256, 1 + STEPS)] * 2


def test_llama_cpp_steps_behind_the_same_context(fakes: None):
    measured = LlamaCppEngine("file", threads=1)
    assert measured.decode_s(8, 256, 0.0) is None
    assert measured.decode_s(1, 256, 0.0) is not None
    assert measured._llama.evaluated == [(0, 256), (256, 1), (256, 1)]


def test_a_peer_in_its_virtual_environment_fills_its_row(tmp_path: Path):
    venv = fake_venv(tmp_path / "venv", *peers.VENV_PEERS)
    found = [(venv, module) for module in peers.VENV_PEERS]
    _, vllm, llama_cpp = peers.runs(found, ["fp32"], tmp_path, "0", 0.0)
    said = engine.measure(vllm.command, os.environ | vllm.environment)
    assert set(said) == {*engine.COLUMNS, "start_s", "rss_nbytes"}
    said = engine.measure(llama_cpp.command, os.environ | llama_cpp.environment)
    assert set(engine.COLUMNS) - set(said) == {
        cells.decode_name(batch, context) for batch, context in cells.DECODES if batch > 1
    }
