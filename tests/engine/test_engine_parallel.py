"""A model split over ranks in real processes computes what it computes in one."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import parallel_ranks
import pytest
import torch
from parallel_ranks import CONFIGS, TIMEOUT_S, make_runner, pool_file, steps
from tiny_llama import TinyCheckpoint, tiny_config

from core.errors import ConfigError, WorkerLost
from engine import batch_bytes
from engine.batch import Batch, Chunk
from engine.device import rank_device
from engine.models.shard import rank_config, rank_weights
from engine.models.weights import load_weights
from engine.parallel import Group, Meeting
from engine.runner import LeadingRunner

TOLERANCE = {"tied": 1e-5, "biases-and-head-norms": 1e-5, "int8": 2e-3}
"""Sums are taken in another order; in int8 that may push an activation over to the next integer."""

ROOT = Path(__file__).resolve().parents[2]


@contextmanager
def ranks(degree: int, port: int, folder: Path) -> Iterator[list[subprocess.Popen[bytes]]]:
    """Processes of ranks 1 .. degree - 1; killed in the end."""
    paths = os.pathsep.join(map(str, (ROOT, ROOT / "tests/engine", ROOT / "tests/shared")))
    children = [
        subprocess.Popen(
            [sys.executable, parallel_ranks.__file__, *map(str, (rank, degree, port)), str(folder)],
            env=os.environ | {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1"},
        )
        for rank in range(1, degree)
    ]
    try:
        yield children
    finally:
        for child in children:
            child.kill()
            child.wait()


@pytest.mark.parametrize("degree", [2, 3])
def test_ranks_give_the_logits_and_the_blocks_of_one_process(degree: int, tmp_path: Path):
    alone = {}
    for name, config in CONFIGS.items():
        runner = make_runner(config, tmp_path)
        alone[name] = [runner.run_chunks(chunks).clone() for chunks in steps()], runner.cache.pool
    meeting = Meeting(TIMEOUT_S)
    with ranks(degree, meeting.port, tmp_path) as children:
        group = Group(meeting, 0, degree, TIMEOUT_S)
        for name, config in CONFIGS.items():
            runner = make_runner(config, tmp_path, group)
            for chunks, expected in zip(steps(), alone[name][0], strict=True):
                got = runner.run_chunks(chunks)
                assert_near(got, expected, TOLERANCE[name])
            runner.cache.pool.numpy().tofile(pool_file(tmp_path, name, 0))
        group.barrier()
        assert [child.wait(TIMEOUT_S) for child in children] == [0] * (degree - 1)
    for name, (_, pool) in alone.items():
        for rank, part in enumerate(pool.chunk(degree, dim=2)):
            stored = np.fromfile(pool_file(tmp_path, name, rank), np.float32).reshape(part.shape)
            assert_near(torch.from_numpy(stored), part, TOLERANCE[name])


def assert_near(got: torch.Tensor, expected: torch.Tensor, tolerance: float) -> None:
    """`tolerance`: in parts of the largest number."""
    assert got.shape == expected.shape
    if expected.numel():
        assert (got - expected).abs().max() <= tolerance * expected.abs().max()


def test_a_rank_that_ends_ends_the_step(tmp_path: Path):
    """1. A rank leaves after its steps.  2. Rank 0 makes one more: WorkerLost, at once; and from then on."""
    meeting = Meeting(TIMEOUT_S)
    with ranks(2, meeting.port, tmp_path) as (child,):
        group = Group(meeting, 0, 2, TIMEOUT_S)
        child.kill()
        for _ in range(2):
            with pytest.raises(WorkerLost, match="rank"):
                group.barrier()


def test_nobody_waits_longer_than_allowed():
    """A rank that never comes, and a store where nobody listens."""
    meeting = Meeting(TIMEOUT_S)
    with pytest.raises(WorkerLost):
        Group(meeting, 0, 2, 0.2)


class Following:
    """Notes what the other ranks were told."""

    def __init__(self) -> None:
        self.told: list[object] = []

    def run(self, batch: Batch) -> None:
        self.told.append(batch.num_tokens)

    def copy_block(self, src: int, dst: int) -> None:
        self.told.append((src, dst))


def test_the_leader_tells_before_it_acts_and_a_broken_step_is_the_end(tmp_path: Path):
    whole, following = make_runner(CONFIGS["tied"], tmp_path), Following()
    leading = LeadingRunner(whole.model, whole.cache, following)
    leading.run_chunks([Chunk([1, 2], 0, [0], 1)])
    leading.copy_block(0, 1)
    assert following.told == [2, (0, 1)]
    assert torch.equal(whole.cache.pool[1], whole.cache.pool[0])
    with pytest.raises(WorkerLost, match="failed in a step that other ranks began"):
        leading.run_chunks([Chunk([10**6], 0, [0], 0)])  # no such token


def test_a_batch_survives_its_journey():
    for chunks in (*steps(), [Chunk([1, 2], 0, [0])]):
        batch = Batch.build(chunks, 16)
        got = batch_bytes.decode(bytearray(batch_bytes.encode(batch)))
        for name in Batch.__slots__:
            ours, theirs = getattr(got, name), getattr(batch, name)
            if isinstance(theirs, torch.Tensor):
                assert ours.dtype == theirs.dtype
                assert torch.equal(ours, theirs), name
            else:
                assert ours == theirs, name


@pytest.mark.parametrize("degree", [2, 3])
def test_parts_are_whole_together(degree: int, tmp_path: Path):
    config = CONFIGS["tied"]
    weights: Any = load_weights(TinyCheckpoint(config), "fp32", tmp_path)
    parts: list[Any] = [rank_weights(config, weights, degree, rank) for rank in range(degree)]
    assert torch.equal(torch.cat([part["lm_head"] for part in parts]), weights["embed"])
    assert torch.equal(torch.cat([part["layers.1.o"] for part in parts], 1), weights["layers.1.o"])
    gates = [part["layers.2.gate_up"].chunk(2)[0] for part in parts]
    assert torch.equal(torch.cat(gates), weights["layers.2.gate_up"].chunk(2)[0])
    assert all(tensor.is_contiguous() for part in parts for tensor in part.values())


def test_int8_panels_are_not_cut(tmp_path: Path):
    """Of 96 units two ranks would have 48 each: one and a half panels."""
    config = CONFIGS["tied"]
    weights = load_weights(TinyCheckpoint(config), "fp32", tmp_path, quantization="int8")
    for rank in range(2):
        with pytest.raises(ConfigError, match="use --quantization none, or another degree"):
            rank_weights(config, weights, 2, rank)
    assert rank_weights(config, weights, 3, 2)["layers.0.down"].shape == (64, 32)


def test_a_degree_that_does_not_divide_is_refused():
    assert rank_config(CONFIGS["tied"], 3).num_kv_heads == 2
    with pytest.raises(ConfigError, match="choose one of 1, 2, 3, 6"):
        rank_config(CONFIGS["tied"], 4)
    with pytest.raises(ConfigError, match=r"choose one of 1, 2$"):
        rank_config(tiny_config(num_heads=4, num_kv_heads=2), 4)


def test_each_rank_has_a_gpu_of_its_own(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    gpu = torch.device("cuda", 0)
    assert [rank_device(gpu, rank, 2) for rank in range(2)] == [torch.device("cuda", i) for i in range(2)]
    assert rank_device(torch.device("cpu"), 2, 3) == torch.device("cpu")
    with pytest.raises(ConfigError, match="needs a GPU for each rank, this process sees 2"):
        rank_device(gpu, 0, 3)
