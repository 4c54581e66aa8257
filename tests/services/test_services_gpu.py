"""Who gets which GPU, as tables."""

from __future__ import annotations

import pytest

from services.worker.gpu import split_gpus, visible_gpus

DEV = ["null", "nvidia0", "nvidia3", "nvidiactl", "nvidia-uvm", "tty1"]


@pytest.mark.parametrize(
    ("environ", "files", "gpus"),
    [
        ({}, ["null"], []),
        ({}, DEV, ["0", "1"]),
        ({"CUDA_VISIBLE_DEVICES": "2, GPU-8f"}, DEV, ["2", "GPU-8f"]),
        ({"CUDA_VISIBLE_DEVICES": ""}, DEV, []),
        ({"CUDA_VISIBLE_DEVICES": "-1"}, DEV, []),
        ({"CUDA_VISIBLE_DEVICES": "1,-1,0"}, DEV, ["1"]),
        ({"CUDA_VISIBLE_DEVICES": "1,,0"}, DEV, ["1"]),
    ],
)
def test_visible(environ: dict[str, str], files: list[str], gpus: list[str]) -> None:
    assert visible_gpus(environ, files) == gpus


@pytest.mark.parametrize(
    ("gpus", "num_workers", "split"),
    [
        ([], 2, []),
        (["0"], 2, [("0", 2), ("0", 2)]),
        (["0", "1"], 2, [("0", 1), ("1", 1)]),
        (["a", "b"], 3, [("a", 2), ("b", 1), ("a", 2)]),
        (["0", "1", "2"], 1, [("0", 1)]),
    ],
)
def test_split(gpus: list[str], num_workers: int, split: list[tuple[str, int]]) -> None:
    assert split_gpus(gpus, num_workers) == split


@pytest.mark.parametrize(
    ("gpus", "num_workers", "split"),
    [
        (["0", "1", "2", "3"], 2, [("0,1", 1), ("2,3", 1)]),
        (["0", "1", "2"], 2, [("0,1", 2), ("0,1", 2)]),
        (["0", "1", "2", "3"], 3, [("0,1", 2), ("2,3", 1), ("0,1", 2)]),
        (["0"], 1, [("0", 1)]),
        ([], 1, []),
    ],
)
def test_split_for_workers_of_two_ranks(
    gpus: list[str], num_workers: int, split: list[tuple[str, int]]
) -> None:
    assert split_gpus(gpus, num_workers, each=2) == split
