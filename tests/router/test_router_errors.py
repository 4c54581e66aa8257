"""The error envelope, field by field, and input that no worker may see (pains A4, A5)."""

from __future__ import annotations

import asyncio
import time

import openai
import pytest

CHAT = {"messages": [{"role": "user", "content": "hi"}]}
TEXT = {"prompt": "hi"}

BAD_CHAT = [
    ({**CHAT, "temperature": "warm"}, "temperature"),
    ({**CHAT, "temperature": 3}, "temperature"),
    ({**CHAT, "max_tokens": 0}, "max_tokens"),
    ({**CHAT, "max_tokens": "many"}, "max_tokens"),
    ({**CHAT, "max_completion_tokens": 1.5}, "max_completion_tokens"),
    ({**CHAT, "max_tokens": 3, "max_completion_tokens": 4}, "max_tokens"),
    ({**CHAT, "n": 0}, "n"),
    ({**CHAT, "n": 65}, "n"),
    ({**CHAT, "n": True}, "n"),
    ({**CHAT, "stream": "yes"}, "stream"),
    ({**CHAT, "stream_options": {"include_usage": True}}, "stream_options"),
    ({**CHAT, "stop": [""]}, "stop"),
    ({**CHAT, "stop": ["x"] * 17}, "stop"),
    ({**CHAT, "stop": 5}, "stop"),
    ({**CHAT, "top_logprobs": 2}, "top_logprobs"),
    ({**CHAT, "logprobs": True, "top_logprobs": 21}, "top_logprobs"),
    ({**CHAT, "tools": [{"type": "function", "function": {"name": "f"}}]}, "tools"),
    ({**CHAT, "tool_choice": "required"}, "tool_choice"),
    ({**CHAT, "frobnicate": 1}, "frobnicate"),
    ({**CHAT, "logit_bias": {"x": 1}}, "logit_bias"),
    ({**CHAT, "logit_bias": {"49152": 1}}, "logit_bias"),
    ({**CHAT, "stop_token_ids": [-1]}, "stop_token_ids"),
    ({**CHAT, "stop_token_ids": [49152]}, "stop_token_ids"),
    ({**CHAT, "min_tokens": 9, "max_tokens": 3}, "min_tokens"),
    ({**CHAT, "seed": 2**64}, "seed"),
    ({**CHAT, "echo": True}, "echo"),
    ({}, "messages"),
    ({"messages": []}, "messages"),
    ({"messages": "hi"}, "messages"),
    ({"messages": [{"role": "wizard", "content": "hi"}]}, "messages"),
    ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": "u"}]}]}, "messages"),
    ({"messages": [{"role": "user", "content": 5}]}, "messages"),
]
BAD_TEXT = [
    ({}, "prompt"),
    ({"prompt": ""}, "prompt"),
    ({"prompt": [""]}, "prompt"),
    ({"prompt": []}, "prompt"),
    ({"prompt": [[]]}, "prompt"),
    ({"prompt": ["a", 1]}, "prompt"),
    ({"prompt": [True]}, "prompt"),
    ({"prompt": 5}, "prompt"),
    ({"prompt": [49152]}, "prompt"),
    ({"prompt": [-1]}, "prompt"),
    ({"prompt": ["a"] * 129}, "prompt"),
    ({"prompt": ["a"] * 128, "n": 5}, "n"),
    ({**TEXT, "best_of": 2}, "best_of"),
    ({**TEXT, "suffix": "x"}, "suffix"),
    ({**TEXT, "logprobs": 21}, "logprobs"),
    ({**TEXT, "logprobs": True}, "logprobs"),
]
SECRET = "the-value-of-the-client"


@pytest.fixture
async def small(stack_of, text):
    """A worker that can hold 16 blocks of 16 tokens."""
    async with stack_of(blocks=16) as stack:
        yield stack


async def test_every_bad_body_is_a_400_that_names_the_field(small):
    for path, table in (("/v1/chat/completions", BAD_CHAT), ("/v1/completions", BAD_TEXT)):
        for body, param in table:
            with pytest.raises(openai.BadRequestError) as caught:
                await small.client.post(
                    path.removeprefix("/v1"), body={"model": small.model, **body}, cast_to=object
                )
            error = caught.value
            assert error.param == param, body
            assert error.type == "invalid_request_error"
            assert set(error.body) == {"message", "type", "param", "code"}
            assert param in error.message
    assert small.worker.starts == []


async def test_values_are_never_repeated(small):
    for body in ({**CHAT, "temperature": SECRET}, {**CHAT, "stop": {SECRET: 1}}, {"messages": [SECRET]}):
        answer = await small.http.post("/v1/chat/completions", json={"model": small.model, **body})
        assert answer.status_code == 400
        assert SECRET not in answer.text


@pytest.mark.parametrize("body", [b"", b"  ", b"{", b"[1]", b"null", b"\xff\xfe", b'{"model": NaN}'])
async def test_what_is_no_json_object(small, body):
    answer = await small.http.post("/v1/chat/completions", content=body)
    assert answer.status_code == 400
    assert answer.json()["error"]["type"] == "invalid_request_error"


async def test_unknown_model_route_and_method(small):
    with pytest.raises(openai.NotFoundError) as caught:
        await small.client.chat.completions.create(model="gpt-9", **CHAT)
    assert caught.value.code == "model_not_found"
    assert caught.value.param == "model"
    with pytest.raises(openai.NotFoundError):
        await small.client.models.retrieve("gpt-9")
    for path in ("/v2/x", "/v1/models/"):
        gone = await small.http.get(path)
        assert (gone.status_code, set(gone.json())) == (404, {"error"})
    wrong = await small.http.get("/v1/completions")
    assert (wrong.status_code, wrong.json()["error"]["code"]) == (405, "method_not_allowed")


async def test_without_a_model_the_served_one_answers(small):
    for path, body in (("/v1/completions", TEXT), ("/v1/chat/completions", CHAT)):
        for extra in ({}, {"model": None}):
            answer = await small.http.post(path, json={**body, **extra})
            assert (answer.status_code, answer.json()["model"]) == (200, small.model)


async def test_null_means_absent_and_idle_values_pass(small):
    nulls = ("temperature", "stop", "max_tokens", "logprobs", "logit_bias", "tools", "seed", "stream", "n")
    idle = {
        "tools": [],
        "tool_choice": "none",
        "response_format": {"type": "text"},
        "parallel_tool_calls": True,
        "metadata": {"a": "b"},
        "store": False,
        "user": "u",
        "n": 1,
        "logit_bias": {},
    }
    for extra in (dict.fromkeys(nulls), idle, {"stream_options": None}):
        answer = await small.http.post("/v1/chat/completions", json={"model": small.model, **CHAT, **extra})
        assert answer.status_code == 200, answer.text
    only_new_limit = {"model": small.model, **CHAT, "max_completion_tokens": 1}
    answer = (await small.http.post("/v1/chat/completions", json=only_new_limit)).json()
    assert answer["usage"]["completion_tokens"] == 1
    parts = [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}]
    parts.append({"role": "assistant", "content": None})
    answer = await small.http.post("/v1/chat/completions", json={"model": small.model, "messages": parts})
    assert answer.status_code == 200


async def test_too_long_names_both_numbers_and_touches_no_worker(small):
    for options in ({"prompt": [504] * 256}, {"prompt": [504] * 200, "max_tokens": 57}):
        with pytest.raises(openai.BadRequestError) as caught:
            await small.client.completions.create(model=small.model, **options)
        assert caught.value.code == "context_length_exceeded"
        assert caught.value.param == "prompt"
        assert "256" in caught.value.message
        assert "257" in caught.value.message
    assert small.worker.starts == []
    await small.client.completions.create(model=small.model, prompt=[504] * 200, max_tokens=56)
    await small.client.completions.create(model=small.model, prompt=[504] * 255)
    assert [s.sampling.max_tokens for s in small.worker.starts] == [56, 1]


async def test_a_body_beyond_the_limit(stack_of):
    async with stack_of(max_body_bytes=1000) as stack:
        answer = await stack.http.post("/v1/completions", json={"model": stack.model, "prompt": "x" * 2000})
        assert answer.status_code == 413
        assert answer.json()["error"]["code"] == "payload_too_large"


async def test_long_prompts_are_encoded_too(stack_of, text):
    prompt = "The quick brown fox. " * 1000
    async with stack_of(blocks=1000) as stack:
        await stack.client.completions.create(model=stack.model, prompt=prompt)
        assert list(stack.worker.starts[0].prompt_token_ids) == text.tokenizer.encode(prompt)


async def test_a_hopeless_text_is_refused_without_being_tokenized(stack_of):
    """Four megabytes cannot fit 8192 tokens whatever they say; other routes answer meanwhile."""
    async with stack_of() as stack:
        began = time.perf_counter()
        answer = await stack.http.post("/v1/completions", json={"prompt": "a " * 2_000_000})
        assert answer.status_code == 400
        assert answer.json()["error"]["code"] == "context_length_exceeded"
        assert "8192" in answer.json()["error"]["message"]
        assert time.perf_counter() - began < 2.0
        assert not stack.worker.starts


async def test_the_default_limit_bounds_min_tokens_too(stack_of):
    async with stack_of() as stack:
        answer = await stack.http.post("/v1/completions", json={**TEXT, "min_tokens": 17})
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "min_tokens")


async def test_a_body_announced_too_large_is_refused_at_once(stack_of):
    async with stack_of(max_body_bytes=1000) as stack:
        host, _, port = stack.url.removeprefix("http://").rstrip("/").partition(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 99999999\r\n\r\n{")
        async with asyncio.timeout(2):
            status_line = await reader.readline()
        writer.close()
        assert b" 413 " in status_line
