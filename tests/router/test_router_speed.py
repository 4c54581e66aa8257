"""The router stays quick: nothing long runs on its loop, and a loop that is behind writes less often."""

from __future__ import annotations

import asyncio

import orjson
import pytest

from core.request import FinishReason, Request, TokenDelta
from services.router.pace import FADE, LATE_S, MAX_REST_S, Pace


async def _silent(request: Request):
    await asyncio.Event().wait()
    yield TokenDelta(request.request_id, 0)


@pytest.mark.parametrize(
    ("late_s", "rest_s"),
    [
        ([0.0], 0.0),
        ([LATE_S], 0.0),
        ([0.02], 0.02),
        ([1.0], MAX_REST_S),
        ([0.02, 0.0], 0.02 * FADE),
        ([0.02, 0.03], 0.03),
        ([0.02, *[0.0] * 20], 0.0),
    ],
)
def test_streams_rest_as_long_as_the_loop_was_late(late_s, rest_s):
    pace = Pace()
    for each in late_s:
        pace.looked(each)
    assert pace.rest_s == pytest.approx(rest_s)


@pytest.mark.parametrize("wanted", [{}, {"logprobs": 0}, {"return_token_ids": True}])
async def test_tokens_that_come_together_are_one_event_for_each_choice(stack_of, wanted):
    ids, ends = (504, 1195, 260), FinishReason.LENGTH
    async with stack_of(_silent) as stack:
        body = {"prompt": "x", "max_tokens": 3, "n": 2, "stream": True, **wanted}
        asked = asyncio.create_task(stack.http.post("/v1/completions", json=body))
        await stack.until(lambda: bool(stack.worker.starts))
        name = stack.worker.starts[0].request_id
        deltas = [TokenDelta(name, i, (each,)) for each in ids[:2] for i in range(2)]
        stack.worker.say(*deltas, *(TokenDelta(name, i, ids[2:], (), ends) for i in range(2)))
        lines = (await asked).text.split("\n\n")
        expected = stack.router.text.tokenizer.decode(ids)
    choices = [orjson.loads(line[6:])["choices"][0] for line in lines if line.startswith("data: {")]
    written = [choice for choice in choices if choice["text"]]
    assert [(c["index"], c["text"], c["finish_reason"]) for c in written] == [
        (0, expected, "length"),
        (1, expected, "length"),
    ]
    if "return_token_ids" in wanted:
        assert [choice["token_ids"] for choice in written] == [list(ids)] * 2


@pytest.mark.parametrize(
    ("path", "body", "status"),
    [
        ("/tokenize", {"prompt": "a train of words that goes on, " * 20_000}, 200),
        ("/detokenize", {"tokens": [504] * 400_000}, 200),
        ("/v1/completions", {"prompt": ["a train of words that goes on, " * 1200] * 32}, 400),
    ],
)
async def test_health_answers_while_something_huge_is_read(stack_of, path, body, status):
    async with stack_of() as stack:
        asked, answered = asyncio.create_task(stack.http.post(path, json=body)), 0
        while not asked.done():
            async with asyncio.timeout(10):
                assert (await stack.http.get("/health")).status_code == 200
            answered += 1
        assert (await asked).status_code == status
    assert answered > 3


async def test_more_messages_than_tokens_fit_are_refused(stack_of):
    async with stack_of() as stack:
        messages = [{"role": "user", "content": ""}] * (stack.router.text.max_position + 1)
        answer = await stack.http.post("/v1/chat/completions", json={"messages": messages})
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "context_length_exceeded")
    assert "messages" in answer.json()["error"]["message"]
