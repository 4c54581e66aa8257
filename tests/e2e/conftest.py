"""What every end-to-end test shares."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest


@pytest.fixture(autouse=True)
def idle_afterwards(request: pytest.FixtureRequest) -> Iterator[None]:
    """However a test went, its living workers hold nothing afterwards: no block, no place, no lease."""
    yield
    if "cluster" in request.fixturenames:
        cluster = request.getfixturevalue("cluster")
        cluster.wait_idle(only=[worker.name for worker in cluster.workers if worker.alive])


@pytest.fixture
def background() -> Iterator[ThreadPoolExecutor]:
    """Requests that run while the test looks on."""
    with ThreadPoolExecutor(32) as pool:
        yield pool
