"""Cores of workers."""

from __future__ import annotations

import pytest

from core.errors import ConfigError
from services.worker.cpu import parse_cores, split_cores


@pytest.mark.parametrize(
    ("text", "cores"), [("", []), ("3", [3]), ("0,2-4", [0, 2, 3, 4]), (" 1 , 2 ", [1, 2])]
)
def test_lists_of_cores(text: str, cores: list[int]) -> None:
    assert parse_cores(text) == cores


def test_a_bad_list_is_refused() -> None:
    with pytest.raises(ConfigError, match="0,2-3"):
        parse_cores("0-x")


@pytest.mark.parametrize(
    ("cores", "workers", "shares"),
    [
        ([0, 1], 2, [[0], [1]]),
        ([0, 1, 2, 3, 4], 2, [[0, 1, 2], [3, 4]]),
        ([5, 7], 1, [[5, 7]]),
        ([0, 1], 3, [[0], [1], [0]]),
    ],
)
def test_every_worker_has_cores_of_its_own(cores: list[int], workers: int, shares: list[list[int]]) -> None:
    assert split_cores(cores, workers) == shares
