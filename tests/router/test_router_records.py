"""Records of requests: what they say, how many are kept, who sees them, and the routes to them."""

from __future__ import annotations

import asyncio

import httpx
import orjson
import pytest
from pydantic import TypeAdapter
from request_records import answered, option, plan
from router_fakes import says

from core.request import FinishReason
from services.router import records as records_module
from services.router.record import MAX_GAPS, Gaps, Record
from services.router.record_json import MAX_CANDIDATES, RequestRecord, describe
from services.router.record_summary import RequestList, summarize
from services.router.records import MAX_LISTED, Records

RECORD, LISTED = TypeAdapter(RequestRecord), TypeAdapter(RequestList)


def kept(*all_: Record, limit_nbytes: int = 2**20) -> Records:
    records = Records(limit_nbytes)
    for each in all_:
        records.began(each)
        records.ended(each)
    return records


def loaded(json: bytes | None) -> RequestRecord:
    assert json is not None
    return RECORD.validate_json(json)


def ids(listed: bytes) -> list[str]:
    return [each.id for each in LISTED.validate_json(listed).data]


def test_a_record_says_what_was_planned_and_what_it_took():
    record = describe(answered())
    assert record.plan is not None
    first, second = record.plan.candidates
    assert (first.chosen, first.prefill, first.ttft_ms, first.transfer_ms) == (True, "prefill-0", 200.0, 10.0)
    assert (second.chosen, second.plan, second.ttft_ms) == (False, "local", 400.0)
    assert (record.targets.ttft_ms, record.targets.itl_ms) == (300.0, 30.0)
    assert (record.slo.ttft, record.slo.itl, record.slo.all) == ("met", "missed", "missed")
    times = record.times
    assert (times.router_ms, times.planned_ttft_ms, times.ttft_ms, times.total_ms) == pytest.approx(
        (10, 250, 260, 350)
    )
    assert (times.itl_ms, times.itl_p99_ms, times.itl_max_ms) == pytest.approx((40, 60, 60))
    assert (times.queue_ms, times.prefill_ms, times.transfer_exposed_ms) == (50.0, 190.0, 12.0)
    assert record.ttft_error_ratio == pytest.approx(0.2)
    tokens = record.tokens_by_source
    assert tokens.cached + tokens.remote + tokens.computed == record.prompt_tokens
    assert loaded(orjson.dumps(record)) == record


def test_a_running_record_is_not_judged():
    record = Record("mine", "a-model")
    assert describe(record).state == "running"
    assert describe(record).http_status is None


def test_of_many_candidates_the_best_are_kept_and_the_chosen_one():
    record = answered(options=[option(f"decode-{i}", 0.1 + i) for i in range(100)])
    assert record.plan is not None
    record.plan = plan(record.plan.options, chosen=70)
    described = describe(record).plan
    assert described is not None
    assert (described.num_candidates, len(described.candidates)) == (100, MAX_CANDIDATES)
    assert [each.decode for each in described.candidates if each.chosen] == ["decode-70"]
    assert described.candidates[0].decode == "decode-0"


def test_a_summary_is_part_of_the_record():
    whole, summary = describe(answered()), summarize(answered())
    assert [getattr(summary, name) for name in ("plan", "reason", "decode", "predicted_ttft_ms", "slo")] == [
        *("disaggregated", "cheapest_pair", "decode-0", 200.0, "missed")
    ]
    for name in ("planned_ttft_ms", "ttft_ms", "itl_ms", "total_ms"):
        assert getattr(summary, name) == getattr(whole.times, name)
    for name in ("state", "http_status", "error", "prompt_tokens", "completion_tokens"):
        assert getattr(summary, name) == getattr(whole, name)
    refused = Record("mine", "a-model")
    refused.ended_at, refused.http_status, refused.error = refused.clock(), 429, "overloaded"
    summary = summarize(refused)
    assert (summary.plan, summary.predicted_ttft_ms, summary.state) == (None, None, "failed")


def test_gaps_are_bounded_and_their_mean_and_maximum_are_not():
    gaps = Gaps()
    for i in range(100):
        gaps.add((i + 1) / 1000)
    assert gaps.quantile(0.99) == pytest.approx(0.099)
    assert gaps.quantile(0.5) == pytest.approx(0.05)
    for _ in range(2 * MAX_GAPS):
        gaps.add(9.0)
    assert len(gaps.first) == MAX_GAPS
    assert gaps.max_s == 9.0
    assert Gaps().quantile(0.99) is None


def test_found_by_each_of_its_names_and_by_no_other_key():
    record = answered("theirs", key="alice")
    records = kept(record)
    for name in (record.request_id, f"cmpl-{record.request_id}", f"chatcmpl-{record.request_id}", "theirs"):
        assert loaded(records.find(name, "alice")).id == record.request_id
        assert records.find(name, "bob") is None
        assert records.find(name, "") is None
    assert records.find("other", "alice") is None
    assert ids(records.newest(9, "alice")) == [record.request_id]
    assert ids(records.newest(9, "bob")) == []


def test_of_one_client_id_the_newest_is_found():
    first, second = answered("again"), answered("again")
    records = kept(first, second)
    assert loaded(records.find("again", "")).id == second.request_id
    third = answered("again")
    third.ended_at = None
    records.began(third)
    assert loaded(records.find("again", "")).state == "running"
    assert ids(records.newest(2, "")) == [third.request_id, second.request_id]


def test_the_oldest_go_when_the_bytes_or_the_places_are_used_up(monkeypatch):
    one = kept(answered()).nbytes
    records = kept(*(answered(f"r{i}") for i in range(20)), limit_nbytes=10 * one)
    assert 8 <= len(records) <= 10
    assert records.nbytes <= 10 * one
    assert records.find("r0", "") is None
    assert records.find("r19", "") is not None
    assert len(records._by_client) == len(records)
    monkeypatch.setattr(records_module, "MAX_RECORDS", 3)
    assert len(kept(*(answered(f"r{i}") for i in range(20)))) == 3
    nothing = kept(answered(), limit_nbytes=0)
    assert (len(nothing), nothing.nbytes, nothing.running, nothing._by_client) == (0, 0, 0, {})


async def ask(stack, name: str, **headers: str):
    body = {"model": stack.model, "prompt": "the canary prompt", "max_tokens": 3}
    return await stack.http.post("/v1/completions", json=body, headers={"X-Request-Id": name, **headers})


async def test_the_routes_tell_of_a_request_without_its_words(stack_of):
    async with stack_of(says([504, 1195], finish=FinishReason.LENGTH)) as stack:
        answer = await ask(stack, "my/own id", **{"X-Baton-TTFT-SLO-MS": "60000"})
        assert float(answer.headers["x-baton-predicted-ttft-ms"]) >= 0
        by_client = await stack.http.get("/v1/requests/my/own id")
        by_answer = await stack.http.get(f"/v1/requests/{answer.json()['id']}")
        assert by_client.content == by_answer.content
        record = RECORD.validate_json(by_client.content)
        assert record.plan is not None
        assert (record.state, record.http_status, record.finish_reason) == ("answered", 200, "length")
        assert (record.plan.reason, record.plan.decode) == (answer.headers["x-baton-reason"], "decode-0")
        assert [each.chosen for each in record.plan.candidates].count(True) == 1
        assert (record.completion_tokens, record.num_choices) == (2, 1)
        assert (record.slo.ttft, record.slo.itl, record.slo.all) == ("met", None, "met")
        assert record.times.ttft_ms is not None
        listed = await stack.http.get("/v1/requests?limit=1")
        [summary] = TypeAdapter(RequestList).validate_json(listed.content).data
        assert summary.id == record.id
        for reply in (by_client, listed):
            assert "canary" not in reply.text


async def test_a_request_that_runs_is_there(stack_of):
    async with stack_of(says([504] * 50, delay_s=0.02)) as stack:
        asked = asyncio.create_task(ask(stack, "long"))
        await stack.until(lambda: bool(stack.worker.open))
        [summary] = (await stack.http.get("/v1/requests")).json()["data"]
        assert (summary["state"], summary["client_request_id"]) == ("running", "long")
        assert (await stack.http.get("/v1/requests/long")).json()["http_status"] is None
        await asked
        assert stack.router.records.running == 0


async def test_what_is_gone_or_asked_for_badly_is_a_sentence(stack_of):
    async with stack_of(request_record_bytes=0) as stack:
        await ask(stack, "mine")
        gone = await stack.http.get("/v1/requests/mine")
        assert (gone.status_code, gone.json()["error"]["code"]) == (404, "not_found")
        assert "--request-record-bytes" in gone.json()["error"]["message"]
        for limit in ("0", str(MAX_LISTED + 1), "x", "-1", "1.5", ""):
            bad = await stack.http.get(f"/v1/requests?limit={limit}")
            assert (bad.status_code, bad.json()["error"]["param"]) == (400, "limit")


async def test_the_key_is_required(stack_of):
    async with stack_of(key="k") as stack:
        await ask(stack, "mine")
        assert (await stack.http.get("/v1/requests/mine")).status_code == 200
        stack.http.headers.pop("authorization")
        for path in ("/v1/requests", "/v1/requests/mine"):
            assert (await stack.http.get(path)).status_code == 401


async def test_a_key_sees_its_own_requests_and_an_admin_key_all(stack_of, tmp_path):
    file = tmp_path / "keys.toml"
    file.write_text('[keys.alice]\nkey = "a"\n[keys.bob]\nkey = "b"\n[keys.root]\nkey = "r"\nadmin = true\n')
    async with stack_of(api_keys_file=str(file)) as stack:

        async def get(key: str, path: str):
            return await stack.http.get(path, headers={"Authorization": f"Bearer {key}"})

        await ask(stack, "mine", Authorization="Bearer a")
        assert (await get("a", "/v1/requests/mine")).json()["key"] == "alice"
        assert (await get("b", "/v1/requests/mine")).status_code == 404
        assert (await get("r", "/v1/requests/mine")).status_code == 200
        seen = {key: len((await get(key, "/v1/requests")).json()["data"]) for key in "abr"}
        assert seen == {"a": 1, "b": 0, "r": 1}


async def test_a_request_that_is_turned_away_early_tells_of_the_plans(stack_of):
    async with stack_of(reject_slo_factor=1) as stack:
        refused = await ask(stack, "hasty", **{"X-Baton-TTFT-SLO-MS": "0.001"})
        assert refused.status_code == 429
        record = RECORD.validate_json((await stack.http.get("/v1/requests/hasty")).content)
        assert (record.state, record.error, record.slo.all) == ("failed", "overloaded", "failed")
        assert record.plan is not None
        assert [each.meets for each in record.plan.candidates] == [False]
        assert record.times.ttft_ms is None


async def test_a_request_that_is_cut_before_it_was_read_has_failed(stack_of):
    """The server ends its task while its body is on the way: it must not count as answered in time."""
    async with stack_of(ttft_slo_ms=1000.0, itl_slo_ms=1000.0) as stack:
        before = asyncio.all_tasks()
        reader, writer = await asyncio.open_connection("127.0.0.1", httpx.URL(stack.url).port)
        writer.write(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 1000\r\n\r\n{")
        await stack.until(lambda: stack.router.records.running == 1)
        for task in asyncio.all_tasks() - before:
            task.cancel()
        async with asyncio.timeout(5):
            assert (await reader.read(12)) == b"HTTP/1.1 503"
        writer.close()
        (summary,) = (await stack.http.get("/v1/requests")).json()["data"]
        assert (summary["http_status"], summary["error"], summary["slo"]) == (503, "unavailable", "failed")
