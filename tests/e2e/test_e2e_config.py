"""What cannot work is refused at start: exit status 2 and one sentence that says what and what to do."""

from __future__ import annotations

import json
import math
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from cluster import ROOT, Cluster, prompt

from checkpoint.open import open_checkpoint

TINY = {
    "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "rms_norm_eps": 1e-5, "vocab_size": 64, "max_position_embeddings": 128,
}  # fmt: skip


def baton(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "services.cli", *arguments],
        cwd=ROOT, env=os.environ | environment, capture_output=True, text=True, timeout=60,
    )  # fmt: skip


def sentence(result: subprocess.CompletedProcess[str]) -> str:
    """What a refused start says on stderr: one line, after log lines at most."""
    assert result.returncode == 2, result.stderr
    *before, last = result.stderr.splitlines()
    assert all(line.startswith('{"') for line in before), result.stderr
    assert last.startswith("baton: ")
    return last


class TestAModelThatCannotBeServed:
    """F1 and what is like it; the same from `serve` as from a worker alone."""

    def test_is_not_there(self):
        assert "--model takes a GGUF file" in sentence(baton("decode", "--model", "/nowhere"))

    def test_is_cut_short(self, tmp_path: Path):
        whole = Path(open_checkpoint("").path)
        cut = tmp_path / "cut.gguf"
        with whole.open("rb") as source:
            cut.write_bytes(source.read(whole.stat().st_size // 2))
        assert str(cut) in sentence(baton("serve", "--model", str(cut)))

    @pytest.mark.parametrize(
        ("config", "named"),
        [
            ({"architectures": ["MambaForCausalLM"], "model_type": "mamba"}, "mamba"),
            ({"rope_scaling": {"rope_type": "spiral", "factor": 2.0}}, "spiral"),
        ],
    )
    def test_is_of_a_kind_nobody_knows(self, tmp_path: Path, config: dict[str, object], named: str):
        llama = {"architectures": ["LlamaForCausalLM"], "model_type": "llama"}
        (tmp_path / "config.json").write_text(json.dumps(TINY | llama | config))
        (tmp_path / "tokenizer.json").write_text("{}")
        assert named in sentence(baton("serve", "--model", str(tmp_path))).lower()

    def test_is_wanted_longer_than_it_is(self):
        assert "8192" in sentence(baton("decode", "--max-model-len", "100000"))


def test_a_pool_beyond_the_memory():
    said = sentence(baton("decode", "--kv-cache-memory-bytes", "100TiB"))
    assert "--kv-cache-memory-bytes" in said


def test_half_precision_on_a_cpu():
    said = sentence(baton("decode", "--dtype", "fp16"))
    assert "bf16 or fp32" in said


@pytest.mark.parametrize(
    ("command", "flag"),
    [("serve", "--port"), ("router", "--port"), ("decode", "--listen"), ("prefill", "--probe-port")],
)
def test_a_port_in_use(command: str, flag: str):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        address = f"127.0.0.1:{port}" if flag == "--listen" else str(port)
        extra = ["--discovery=static://127.0.0.1:1"] if command == "router" else []
        said = sentence(baton(command, flag, address, *extra))
    assert str(port) in said
    assert flag in said


@pytest.mark.parametrize("command", ["serve", "decode"])
def test_a_host_that_is_not_here_is_no_port_in_use(command: str):
    flags = ["--host=192.0.2.1"] if command == "serve" else ["--listen=192.0.2.1:0"]
    said = sentence(baton(command, *flags))
    assert "Cannot assign requested address" in said
    assert flags[0].partition("=")[0] in said


def test_a_worker_has_to_say_where_peers_reach_it():
    assert "--advertise" in sentence(baton("prefill", "--listen", "0.0.0.0:0"))


def test_a_pool_of_one_block():
    said = sentence(baton("decode", "--num-blocks", "1"))
    assert "--num-blocks" in said
    assert "greater than or equal to 2" in said


def test_two_workers_that_give_up_are_told_of_once():
    """Both refuse for the same reason: one sentence, the worker's own, and its exit status."""
    assert "--max-model-len" in sentence(baton("serve", "--port=0", "--max-model-len=100000"))


class TestASettingNobodyKnows:
    """The nearest one is named, wherever the wrong one came from."""

    def test_as_a_flag(self):
        assert "--num-blocks" in sentence(baton("decode", "--num-bloks", "3"))

    def test_the_role_is_the_command(self):
        assert "--role" in sentence(baton("decode", "--role", "prefill"))

    def test_in_the_environment(self):
        said = sentence(baton("decode", BATON_NUM_BLOKS="3"))
        assert "BATON_NUM_BLOKS" in said
        assert "num_blocks" in said

    def test_in_a_file(self, tmp_path: Path):
        file = tmp_path / "baton.toml"
        file.write_text("num_bloks = 3\n")
        said = sentence(baton("decode", "--config", str(file)))
        assert str(file) in said
        assert "num_blocks" in said


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with Cluster(prefill=0, dtype="bf16", num_blocks=32) as cluster:
        yield cluster


def test_bf16_gives_finite_numbers_and_sense(cluster: Cluster):
    """F9."""
    reply = cluster.complete(prompt("chat-capital"), max_tokens=8, logprobs=3)
    choice = reply.json()["choices"][0]
    assert "Paris" in choice["text"]
    values = choice["logprobs"]["token_logprobs"]
    assert len(values) == len(choice["token_ids"])
    assert all(math.isfinite(value) and -50 < value <= 0 for value in values)


def test_auto_states_its_choice(cluster: Cluster):
    """F9. In the log, in the probe, and as the fingerprint that decides who may work together."""
    worker = cluster.restart("decode-0", dtype="auto")
    footprint = worker.ready()["footprint"]
    assert footprint["dtype"] in ("fp32", "bf16")
    assert len(footprint["dtype_reason"]) > 10
    assert footprint["dtype_reason"] in worker.log.read_text()
    listed = httpx.get(f"{cluster.url}/v1/cluster").json()["workers"][0]
    assert listed["dtype"] == footprint["dtype"]
    assert listed["fingerprint"]["kv_dtype"] == footprint["dtype"]
