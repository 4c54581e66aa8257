"""The embedded model, opened once."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from checkpoint.checkpoint import Checkpoint
from checkpoint.open import open_checkpoint
from checkpoint.tokenizer import Tokenizer

GOLD = Path(__file__).parents[1] / "data" / "gold.json"


@pytest.fixture(scope="session")
def embedded() -> Checkpoint:
    return open_checkpoint("")


@pytest.fixture(scope="session")
def tokenizer(embedded: Checkpoint) -> Tokenizer:
    return embedded.load_tokenizer()


@pytest.fixture(scope="session")
def gold() -> list[dict[str, Any]]:
    return json.loads(GOLD.read_text())["cases"]
