"""The cluster that the faults of a module strike, whole again before and after each of them."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
from fault_cluster import FaultCluster


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FaultCluster]:
    with FaultCluster(tmp_path_factory.mktemp("gates")) as cluster:
        yield cluster


@pytest.fixture
def cluster(fleet: FaultCluster) -> Iterator[FaultCluster]:
    fleet.restore()
    yield fleet
    fleet.restore()


@pytest.fixture
def background() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(32) as pool:
        yield pool
