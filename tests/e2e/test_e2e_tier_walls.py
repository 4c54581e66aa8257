"""Who finds whose blocks: every process the same model's, nobody another model's, dtype's or tenant's."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from cluster import Cluster, Process, fresh_salt, only_choice, prompt
from redis_process import RedisServer
from tier_probes import BLOCK_NBYTES, ask, is_from, tier, wait_stored

from checkpoint.gguf_file import GGUFFile
from checkpoint.open import embedded_model_path

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

CASE, NUM_BLOCKS = "story-129", 8
COLD = {"computed": 129}


@pytest.fixture
def server(tmp_path: Path) -> Iterator[RedisServer]:
    server = RedisServer(tmp_path / "redis")
    yield server
    server.stop()


@pytest.fixture
def other_weights(tmp_path: Path) -> Iterator[dict[str, object]]:
    """Flags for the embedded model with other values in one tensor, the norm before the first layer."""
    folder = tmp_path / "other"
    folder.mkdir()
    original = embedded_model_path()
    (tensor,) = (each for each in GGUFFile(original).tensors if each.name == "blk.0.attn_norm.weight")
    path = Path(shutil.copy(original, folder / original.name))
    values = np.memmap(path, np.float32, "r+", tensor.offset, tensor.shape)
    values[::2] *= 1.5
    values.flush()
    yield {"model": path, "cache_dir": folder / "cache"}
    shutil.rmtree(folder)  # the converted weights are large


def hits(worker: Process) -> float:
    return sum(tier(worker, name)["hits"] for name in ("host", "disk", "redis"))


def wait_all_stored(worker: Process, before: dict[str, dict[str, float]]) -> None:
    for name, counted in before.items():
        wait_stored(worker, name, NUM_BLOCKS, counted)


def lower_tiers(worker: Process) -> dict[str, dict[str, float]]:
    return {name: tier(worker, name) for name in ("disk", "redis")}


def test_other_weights_and_another_kv_dtype_find_nothing(
    tmp_path: Path, server: RedisServer, other_weights: dict[str, object]
) -> None:
    """D4. Lives of one worker under one name, with one directory and one Redis:  1. other weights of the same
    shapes store their blocks.  2. The real weights find none of them, and answer as GOLD.  3. Another KV dtype
    finds none of either.  4. The real weights find their own; another tenant does not."""
    salt = fresh_salt()
    flags = {
        "host_cache_bytes": "64MiB",
        "store_policy": "write-through",
        "disk_cache_dir": tmp_path / "disk",
        "redis_url": server.url,
    }
    with Cluster(prefill=0, served_model_name="one-name", **flags) as cluster:
        d = cluster.restart("decode-0", **other_weights)
        before = lower_tiers(d)
        only_choice(cluster.complete(prompt(CASE), plan="local", cache_salt=salt, max_tokens=8))
        wait_all_stored(d, before)

        d = cluster.restart("decode-0")
        assert tier(d, "disk")["used_nbytes"] > NUM_BLOCKS * BLOCK_NBYTES, "the files of step 1"
        before = lower_tiers(d)
        assert ask(cluster, salt, CASE) == COLD
        assert hits(d) == 0
        wait_all_stored(d, before)

        d = cluster.restart("decode-0", kv_cache_dtype="bf16")
        reply = cluster.complete(prompt(CASE), plan="local", cache_salt=salt, max_tokens=8)
        assert only_choice(reply)["token_ids"]
        assert reply.json()["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
        assert hits(d) == 0

        d = cluster.restart("decode-0")
        assert is_from(ask(cluster, salt, CASE), "disk", CASE)
        found = hits(d)
        assert ask(cluster, fresh_salt(), CASE) == COLD
        assert hits(d) == found
        assert all(counted["corrupt"] == 0 for counted in lower_tiers(d).values())


def test_a_process_that_hashes_otherwise_finds_it(server: RedisServer) -> None:
    """D5. 1. The prefill worker computes a prompt, and stores it in Redis.  2. The decode worker, for which
    Python hashes strings otherwise and which kept nothing, finds it there."""
    salt = fresh_salt()
    tiers = {"redis_url": server.url, "store_policy": "write-through"}
    cluster = Cluster(prefill_flags=tiers)
    p, d = cluster.workers
    p.env, d.env = {"PYTHONHASHSEED": "1"}, {"PYTHONHASHSEED": "2"}
    with cluster:
        before = tier(p, "redis")
        assert ask(cluster, salt, CASE, "disaggregated") == {"prefill_worker": 128, "computed": 1}
        wait_stored(p, "redis", NUM_BLOCKS, before)
        cluster.restart("decode-0", **tiers)
        assert is_from(ask(cluster, salt, CASE), "redis", CASE)
