"""What a decode worker refuses before its engine sees it."""

from __future__ import annotations

from typing import Any

import pytest

from core.errors import InvalidParameter
from core.request import Request, SamplingParams
from services.decode.checks import check

GOOD: dict[str, Any] = {"max_tokens": 4, "seed": 0, "n": 2}


def request(prompt: tuple[int, ...] = (1, 2), resumed: Any = (), **given: Any) -> Request:
    return Request("r", prompt, SamplingParams(**GOOD | given), resumed=resumed)


@pytest.mark.parametrize("resumed", [(), ((0, ()),), ((1, (9, 9, 9)), (0, ())), ((0, (1,)), (1, (2, 3)))])
def test_what_can_be_run(resumed) -> None:
    check(request(resumed=resumed), vocab_size=10)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"prompt": ()}, "no tokens"),
        ({"prompt": (1, 10)}, "token id 10"),
        ({"logit_bias": ((11, 1.0),)}, "token id 11"),
        ({"bad_words": ((1, 12),)}, "token id 12"),
        ({"n": 0}, "out of range"),
        ({"resumed": ((0, (13,)),)}, "token id 13"),
        ({"resumed": ((2, (1,)),)}, "may go on once"),
        ({"resumed": ((1, (1,)), (1, ()))}, "may go on once"),
        ({"resumed": ((0, (1, 2, 3, 4)),)}, "4 tokens already"),
        ({"resumed": ((0, (1,)),), "prompt_logprobs": True}, "first token of all"),
    ],
)
def test_what_cannot(given: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidParameter, match=message):
        check(request(**given), vocab_size=10)
