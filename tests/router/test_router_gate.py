"""Keys, request ids, metrics and logs: nothing leaks, nothing grows (E8, E9)."""

from __future__ import annotations

import re

import openai
import pytest
import structlog
from router_fakes import says

from core import metric_names as names

KEY = "canary-key-7b1f"
PROMPT = "canary-prompt-90210"
ANSWER = "canary-answer-4711"
ROUTES = [
    ("GET", "/v1/models"),
    ("GET", "/v1/models/x"),
    ("POST", "/v1/completions"),
    ("POST", "/v1/chat/completions"),
    ("POST", "/tokenize"),
    ("POST", "/detokenize"),
    ("GET", "/version"),
    ("GET", "/metrics"),
    ("GET", "/v1/cluster"),
    ("GET", "/docs"),
    ("GET", "/openapi.json"),
    ("GET", "/nowhere"),
]


async def test_every_route_but_the_probes_wants_the_key(stack_of):
    async with stack_of(key=KEY) as stack:
        for wrong in ({}, {"Authorization": "Bearer nope"}, {"Authorization": KEY}):
            stack.http.headers.pop("authorization", None)
            for method, path in ROUTES:
                answer = await stack.http.request(method, path, headers=wrong)
                assert answer.status_code == 401, path
                assert answer.json()["error"]["code"] == "invalid_api_key"
            for path in ("/startup", "/live", "/health", "/ready"):
                assert (await stack.http.get(path, headers=wrong)).status_code == 200
        await stack.client.completions.create(model=stack.model, prompt="x")
        stranger = openai.AsyncOpenAI(base_url=f"{stack.url}/v1", api_key="nope", max_retries=0)
        async with stranger:
            with pytest.raises(openai.AuthenticationError):
                await stranger.models.list()


async def test_canaries_are_in_no_log_and_no_metric(stack_of, text, capfd):
    with structlog.testing.capture_logs() as captured:
        async with stack_of(says(text.tokenizer.encode(ANSWER)), key=KEY) as stack:
            for stream in (False, True):
                body = {"model": stack.model, "prompt": PROMPT, "stream": stream, "stop": [PROMPT]}
                answer = await stack.http.post("/v1/completions", json=body)
                assert answer.status_code == 200
                chat = {"model": stack.model, "messages": [{"role": "user", "content": PROMPT}]}
                await stack.http.post("/v1/chat/completions", json=chat | {"stream": stream})
                await stack.http.post("/v1/chat/completions", json=chat | {"temperature": PROMPT})
                await stack.http.get(f"/{PROMPT}", headers={"Authorization": f"Bearer {KEY}x"})
                await stack.http.post("/v1/completions", json={**body, "model": PROMPT})
            metrics = (await stack.http.get("/metrics")).text
            cluster = (await stack.http.get("/v1/cluster")).text
    out = capfd.readouterr()
    everything = repr(captured) + metrics + cluster + out.out + out.err
    for canary in (KEY, PROMPT, ANSWER, ANSWER[:13]):
        assert canary not in everything
    done = [line for line in captured if line["event"] == "request.done"]
    assert len(done) == 4
    wanted = {
        *("model", "prompt_tokens", "completion_tokens", "cached_tokens", "queue_time_ms"),
        *("time_to_first_token_ms", "kv_transfer_ms", "total_time_ms", "tokens_per_second"),
        *("finish_reason", "http_status", "plan_reason", "prefill_worker", "decode_worker"),
    }
    assert wanted <= set(done[0])
    assert done[0]["finish_reason"] == "stop"
    assert done[0]["completion_tokens"] == len(text.tokenizer.encode(ANSWER)) + 1


async def test_metric_names_and_their_aliases(stack_of):
    async with stack_of() as stack:
        await stack.client.completions.create(model=stack.model, prompt="x")
        answer = await stack.http.get("/metrics")
        assert answer.headers["content-type"].startswith("text/plain")
        found = set(re.findall(r"^# TYPE (\S+)", answer.text, re.MULTILINE))
        ours = {
            *(names.REQUESTS, names.PLANS, names.TTFT, names.ITL, names.E2E, names.PROMPT_TOKENS),
            *(names.GENERATION_TOKENS, names.FINISHED, names.CLIENT_GONE, names.WORKERS, names.FAULTS),
            *(names.REQUESTS_IN_FLIGHT, names.WORKER_CONNECTIONS_LOST),
        }
        theirs = {alias for alias, name in names.VLLM_ALIASES.items() if name in ours}
        assert ours | theirs <= found
        model = f'{{model_name="{stack.model}"}}'
        for name in (names.GENERATION_TOKENS, "vllm:generation_tokens_total"):
            assert f"{name}{model} 3.0" in answer.text
        assert f"vllm:time_to_first_token_seconds_count{model} 1.0" in answer.text
        assert 'baton_workers{role="decode",state="ready"} 1.0' in answer.text
        assert 'baton_plans_total{plan="local",reason="no_prefill_worker"} 1.0' in answer.text


async def test_request_ids_are_echoed_capped_and_not_used_inside(stack_of):
    async with stack_of() as stack:
        body = {"model": stack.model, "prompt": "x"}

        async def ask(request_id):
            headers = {} if request_id is None else {"X-Request-Id": request_id}
            return await stack.http.post("/v1/completions", json=body, headers=headers)

        assert (await ask("mine-7")).headers["x-request-id"] == "mine-7"
        assert (await ask("a" * 500)).headers["x-request-id"] == "a" * 128
        assert (await ask("tab\there")).headers["x-request-id"].startswith("req-")
        assert (await ask(None)).headers["x-request-id"].startswith("req-")
        inside = [s.request_id for s in stack.worker.starts]
        assert len(set(inside)) == 4
        assert not any("mine-7" in each for each in inside)
        failed = await stack.http.get("/nowhere", headers={"X-Request-Id": "mine-7"})
        assert failed.headers["x-request-id"] == "mine-7"


async def test_loading_is_alive_but_not_ready(stack_of):
    async with stack_of() as stack:
        text, stack.router.text = stack.router.text, None
        for path, status in (("/health", 200), ("/live", 200), ("/startup", 503)):
            assert (await stack.http.get(path)).status_code == status
        for method, path in ROUTES[:7]:
            answer = await stack.http.request(method, path)
            assert answer.status_code == (200 if path == "/version" else 503), path
        ready = await stack.http.get("/ready")
        assert (ready.status_code, ready.json()["ready"]) == (503, False)
        stack.router.text = text
        assert (await stack.http.get("/ready")).status_code == 200
        assert (await stack.http.get("/startup")).json() == {"status": "started"}
