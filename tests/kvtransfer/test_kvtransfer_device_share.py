"""What one rank tells another about its GPU memory; the memory itself needs two GPUs."""

from __future__ import annotations

import json

import pytest

from kvtransfer.device_share import decode, encode

SHARED = (1, bytes(range(64)), 2**31, 0, b"/torch_1_2", 3, b"\xff\0", True)


def test_a_message_is_json_and_gives_back_what_went_in() -> None:
    message = encode(SHARED)
    assert json.loads(message)["nbytes"] == 2**31
    assert decode(message) == SHARED


def test_another_torch_that_shares_otherwise_is_noticed() -> None:
    with pytest.raises(ValueError, match="zip"):
        encode(SHARED[:-1])
