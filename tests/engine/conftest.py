from __future__ import annotations

import pytest
from hash_model import Harness


@pytest.fixture
def harness():
    """Makes engines on the hash model; after the test all of them must be idle with all blocks free."""
    made: list[Harness] = []

    def make(**given: object) -> Harness:
        made.append(Harness(**given))  # type: ignore[arg-type]
        return made[-1]

    yield make
    for each in made:
        each.assert_idle()
