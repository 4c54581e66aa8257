"""Shapes of answers, driven by the official client (pains A1, A3, A9)."""

from __future__ import annotations

import pytest
from router_fakes import EOS, says

from core.request import FinishReason, Gathered

STORY = "Once upon a time there was a fox 🦊🦊 and 삼겹살."


@pytest.fixture
def story(text) -> list[int]:
    return text.tokenizer.encode(STORY)


async def chat(stack, **options):
    return await stack.client.chat.completions.create(
        model=stack.model, messages=[{"role": "user", "content": "Tell me a story"}], **options
    )


async def complete(stack, prompt="Hello there", **options):
    return await stack.client.completions.create(model=stack.model, prompt=prompt, **options)


async def test_chat_and_completion_say_what_the_worker_said(stack_of, story):
    async with stack_of(says(story)) as stack:
        answer = await chat(stack)
        assert answer.object == "chat.completion"
        assert answer.choices[0].message.role == "assistant"
        assert answer.choices[0].message.content == STORY
        assert answer.choices[0].finish_reason == "stop"
        assert answer.usage.completion_tokens == len(story) + 1
        assert answer.usage.prompt_tokens == len(stack.worker.starts[0].prompt_token_ids)
        completion = await complete(stack, max_tokens=100)
        assert completion.object == "text_completion"
        assert completion.choices[0].text == STORY
        assert completion.model == stack.model


async def test_defaults_of_the_limit(stack_of, story):
    async with stack_of(says(story * 100, finish=FinishReason.LENGTH)) as stack:
        completion = await complete(stack)
        assert completion.usage.completion_tokens == 16
        assert completion.choices[0].finish_reason == "length"
        await chat(stack, max_completion_tokens=5)
        assert stack.worker.starts[1].sampling.max_tokens == 5
        answer = await chat(stack)
        left = 8192 - answer.usage.prompt_tokens
        assert stack.worker.starts[2].sampling.max_tokens == left


@pytest.mark.parametrize("limit", [1, 5, 17, 18, 40])
async def test_stream_equals_whole_even_when_a_character_is_cut(stack_of, story, limit):
    async with stack_of(says(story)) as stack:
        whole = await complete(stack, max_tokens=limit)
        events = [e async for e in await complete(stack, max_tokens=limit, stream=True)]
        text = "".join(e.choices[0].text for e in events)
        assert text == whole.choices[0].text
        reasons = [e.choices[0].finish_reason for e in events if e.choices[0].finish_reason]
        assert reasons == [whole.choices[0].finish_reason]


async def test_every_streamed_piece_is_whole_characters(stack_of, story):
    async with stack_of(says(story)) as stack:
        events = [e async for e in await chat(stack, stream=True)]
        assert events[0].choices[0].delta.role == "assistant"
        pieces = [e.choices[0].delta.content or "" for e in events]
        assert "".join(pieces) == STORY
        assert not any("\ufffd" in piece for piece in pieces)


OPTIONS = [None, {}, {"include_usage": False}, {"include_usage": True}]


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("ask", [chat, complete])
async def test_usage_in_streams_only_when_asked(stack_of, story, ask, options):
    cached = Gathered(cached_tokens=3, remote_tokens=4, remote_cached_tokens=2)
    async with stack_of(says(story, gathered=cached)) as stack:
        whole = await ask(stack, n=2, max_tokens=64)
        extra = {} if options is None else {"stream_options": options}
        events = [e async for e in await ask(stack, n=2, max_tokens=64, stream=True, **extra)]
        wanted = bool(options and options.get("include_usage"))
        assert whole.usage.completion_tokens == 2 * (len(story) + 1)
        assert whole.usage.prompt_tokens_details.cached_tokens == 5
        with_usage = [e for e in events if e.usage is not None]
        assert [e.choices for e in with_usage] == ([[]] if wanted else [])
        if wanted:
            assert events[-1] is with_usage[0]
            assert events[-1].usage == whole.usage
        raw = await stack.http.post(
            "/v1/completions",
            json={"model": stack.model, "prompt": "x", "stream": True, "stream_options": options},
        )
        lines = [line for line in raw.text.split("\n\n") if line]
        assert lines[-1] == "data: [DONE]"
        assert all(('"usage":null' in line) is wanted for line in lines[: -2 if wanted else -1])


async def test_n_choices_and_prompts_have_their_own_index_and_one_finish(stack_of, story):
    async with stack_of(says(story)) as stack:
        events = [
            e
            async for e in await complete(
                stack, prompt=["first prompt", "second"], n=3, stream=True, max_tokens=64, seed=7
            )
        ]
        finishes = [c.index for e in events for c in e.choices if c.finish_reason]
        assert sorted(finishes) == [0, 1, 2, 3, 4, 5]
        for index in range(6):
            assert "".join(c.text for e in events for c in e.choices if c.index == index) == STORY
        starts = list(stack.worker.starts)
        assert [s.sampling.n for s in starts] == [3, 3]
        assert {s.sampling.seed for s in starts} == {7}
        whole = await complete(stack, prompt=["first prompt", "second"], n=3, max_tokens=64)
        assert [c.index for c in whole.choices] == [0, 1, 2, 3, 4, 5]
        assert whole.usage.prompt_tokens == sum(len(s.prompt_token_ids) for s in starts)


async def test_seeds_are_drawn_and_passed(stack_of):
    async with stack_of() as stack:
        for seed in (None, None, 5, -1):
            await complete(stack, **({} if seed is None else {"seed": seed}))
        seeds = [s.sampling.seed for s in stack.worker.starts]
        assert len(set(seeds)) == 4
        assert seeds[2:] == [5, 2**64 - 1]


@pytest.mark.parametrize("prompt", [[504, 1195], [[504, 1195], [29, 30, 31]], "a <|im_end|> b"])
async def test_prompt_forms_reach_the_worker(stack_of, text, prompt):
    async with stack_of() as stack:
        await complete(stack, prompt=prompt)
        sent = [list(s.prompt_token_ids) for s in stack.worker.starts]
        if isinstance(prompt, str):
            assert sent == [text.tokenizer.encode(prompt)]
            assert EOS in sent[0]
        else:
            assert sent == (prompt if isinstance(prompt[0], list) else [prompt])


async def test_token_ids_are_returned_when_asked(stack_of, story):
    extra = {"return_token_ids": True}
    async with stack_of(says(story)) as stack:
        whole = await chat(stack, extra_body=extra)
        prompt_ids = list(stack.worker.starts[0].prompt_token_ids)
        assert whole.choices[0].token_ids == [*story, EOS]
        assert whole.prompt_token_ids == prompt_ids
        events = [e async for e in await chat(stack, extra_body=extra, stream=True, n=2)]
        for index in (0, 1):
            ids = [
                i
                for e in events
                for c in e.choices
                if c.index == index
                for i in getattr(c, "token_ids", None) or []
            ]
            assert ids == [*story, EOS]
        assert [e.prompt_token_ids for e in events if hasattr(e, "prompt_token_ids")] == [prompt_ids]
        completion = await complete(stack, prompt=["a b", "c"], n=2, extra_body=extra, max_tokens=4)
        with_prompt = [getattr(c, "prompt_token_ids", None) for c in completion.choices]
        sent = [list(s.prompt_token_ids) for s in stack.worker.starts[-2:]]
        assert with_prompt == [sent[0], None, sent[1], None]
        stream = await complete(stack, prompt="a b", extra_body=extra, max_tokens=4, stream=True)
        choices = [c async for e in stream for c in e.choices]
        assert [i for c in choices for i in getattr(c, "token_ids", None) or []] == story[:4]
        assert [c.prompt_token_ids for c in choices if hasattr(c, "prompt_token_ids")] == [sent[0]]


async def test_the_end_token_has_no_text_even_if_it_is_an_ordinary_one(stack_of, text):
    ids = text.tokenizer.encode("one two three")
    async with stack_of(says(ids)) as stack:
        extra = {"stop_token_ids": [ids[1]], "return_token_ids": True}
        answer = await complete(stack, extra_body=extra)
        assert answer.choices[0].text == "one"
        assert answer.choices[0].finish_reason == "stop"
        assert answer.choices[0].token_ids == ids[:2]
        assert answer.usage.completion_tokens == 2


async def test_ignore_eos_and_stop_ids_make_the_final_stop_set(stack_of):
    async with stack_of() as stack:
        await complete(stack, extra_body={"stop_token_ids": [7]})
        await complete(stack, extra_body={"stop_token_ids": [7], "ignore_eos": True})
        await complete(stack, extra_body={"ignore_eos": True})
        sets = [set(s.sampling.stop_token_ids) for s in stack.worker.starts]
        assert sets == [set(stack.router.text.eos_token_ids) | {7}, {7}, set()]


async def test_an_answer_that_ends_at_its_first_token(stack_of, text):
    """By its limit, by the end token, by a stop string: one token is counted, then nothing more."""
    ids = text.tokenizer.encode("stop here")
    async with stack_of(says(ids)) as stack:
        for stream in (False, True):
            for options, said, reason in (
                ({"max_tokens": 1}, "stop", "length"),
                ({"stop": "stop"}, "", "stop"),
                ({"stop": "p"}, "sto", "stop"),
                ({"extra_body": {"stop_token_ids": [ids[0]]}}, "", "stop"),
            ):
                answer = await complete(stack, stream=stream, **options)
                choices = [c async for e in answer for c in e.choices] if stream else answer.choices
                assert "".join(c.text for c in choices) == said
                assert [c.finish_reason for c in choices if c.finish_reason] == [reason]
                assert stream or answer.usage.completion_tokens == 1
        stack.worker.script = says([])
        answer = await chat(stack)
        assert (answer.choices[0].message.content, answer.choices[0].finish_reason) == ("", "stop")
        assert answer.usage.completion_tokens == 1


async def test_sampling_parameters_arrive(stack_of):
    async with stack_of() as stack:
        await complete(
            stack,
            temperature=0.5,
            top_p=0.9,
            presence_penalty=0.1,
            frequency_penalty=-0.2,
            logit_bias={"29": 3, "504": -100},
            logprobs=3,
            max_tokens=9,
            user="someone",
            extra_body={
                "top_k": -1,
                "min_p": 0.05,
                "repetition_penalty": 1.3,
                "min_tokens": 2,
                "cache_salt": "s",
            },
        )
        request = stack.worker.starts[0]
        s = request.sampling
        assert (s.temperature, s.top_p, s.top_k, s.min_p) == (0.5, 0.9, 0, 0.05)
        assert (s.presence_penalty, s.frequency_penalty, s.repetition_penalty) == (0.1, -0.2, 1.3)
        assert s.logit_bias == ((29, 3.0), (504, -100.0))
        assert (s.logprobs, s.max_tokens, s.min_tokens, request.cache_salt) == (3, 9, 2, "s")


async def test_the_small_routes(stack_of):
    async with stack_of() as stack:
        models = [m.id async for m in stack.client.models.list()]
        assert models == [stack.model]
        assert (await stack.client.models.retrieve(stack.model)).id == stack.model
        tokens = (await stack.http.post("/tokenize", json={"prompt": STORY})).json()
        assert tokens["count"] == len(tokens["tokens"])
        back = await stack.http.post("/detokenize", json={"tokens": tokens["tokens"]})
        assert back.json() == {"prompt": STORY}
        messages = [{"role": "user", "content": "hi"}]
        rendered = (await stack.http.post("/tokenize", json={"messages": messages})).json()["tokens"]
        await stack.client.chat.completions.create(model=stack.model, messages=messages)
        assert list(stack.worker.starts[0].prompt_token_ids) == rendered
        assert "version" in (await stack.http.get("/version")).json()
        worker = (await stack.http.get("/v1/cluster")).json()["workers"][0]
        assert worker["id"] == "decode-0"
        assert worker["state"] == "ready"
        assert worker["total_blocks"] == worker["free_blocks"] == 512
        assert worker["fingerprint"]["block_size"] == 16
