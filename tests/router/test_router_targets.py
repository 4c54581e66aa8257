"""Targets: how a client sets them, who hears of them, and how they are counted afterwards."""

from __future__ import annotations

import re

import pytest
from request_records import Clock, answered, option
from router_fakes import says

from core.errors import EngineFault, InvalidParameter, Overloaded, Unavailable
from core.request import FinishReason
from core.settings import Settings
from planning.estimate import Targets
from services.router.choice import Piece
from services.router.keys import NO_KEY
from services.router.metrics import RouterMetrics
from services.router.progress import Progress
from services.router.record import Record
from services.router.records import Records
from services.router.targets import ITL_HEADER, TTFT_HEADER, left, targets_of

SERVER = Settings(ttft_slo_ms=500, itl_slo_ms=50)


def scope(**headers: str) -> dict[str, object]:
    raw = [(f"x-baton-{name}-slo-ms".encode(), value.encode("latin-1")) for name, value in headers.items()]
    return {"headers": raw}


@pytest.mark.parametrize(
    ("headers", "settings", "targets"),
    [
        ({}, Settings(), Targets()),
        ({}, SERVER, Targets(0.5, 0.05)),
        ({"ttft": "250"}, SERVER, Targets(0.25, 0.05)),
        ({"itl": " 37.5 "}, Settings(), Targets(0.0, 0.0375)),
        ({"ttft": "0", "itl": "0"}, SERVER, Targets()),
    ],
)
def test_a_header_counts_before_the_settings(headers, settings, targets):
    assert targets_of(scope(**headers), settings) == targets


@pytest.mark.parametrize(
    "value", ["", "fast", "-1", "nan", "inf", "1e3", "1_000", "1" * 10, "٣", "1 2", ".5"]
)
@pytest.mark.parametrize(("header", "name"), [("ttft", TTFT_HEADER), ("itl", ITL_HEADER)])
def test_a_bad_header_is_named(value, header, name):
    with pytest.raises(InvalidParameter, match=name) as caught:
        targets_of({"headers": [(name.lower().encode(), value.encode("utf-8"))]}, Settings())
    assert caught.value.param == name


async def ask(stack, **headers: str):
    body = {"model": stack.model, "prompt": "x", "max_tokens": 3}
    return await stack.http.post("/v1/completions", json=body, headers=headers)


def counted(text: str) -> dict[tuple[str, str], float]:
    found = re.findall(r'baton_slo_requests_total\{result="(\w+)",target="(\w+)"\} (\S+)', text)
    return {(target, result): float(count) for result, target, count in found}


async def test_the_worker_hears_of_its_target_and_the_client_of_a_bad_one(stack_of):
    async with stack_of(itl_slo_ms=40) as stack:
        await ask(stack)
        await ask(stack, **{ITL_HEADER: "12.5"})
        assert [start.itl_slo_s for start in stack.worker.starts] == [0.04, 0.0125]
        bad = await ask(stack, **{TTFT_HEADER: "soon"})
        assert (bad.status_code, bad.json()["error"]["param"]) == (400, TTFT_HEADER)


async def test_attainment_counts_rejections_as_failed_and_leaves_bad_requests_out(stack_of):
    script = says([504] * 9, finish=FinishReason.LENGTH)
    async with stack_of(script, max_concurrent_requests=1, ttft_slo_ms=60_000) as stack:
        await ask(stack)
        await ask(stack, **{ITL_HEADER: "0.000001"})
        await ask(stack, **{TTFT_HEADER: "0"})
        assert (await stack.http.post("/v1/completions", json={"prompt": 5})).status_code == 400
        with stack.router.admit(NO_KEY.share):
            assert (await ask(stack)).status_code == 429
        text = stack.router.metrics.exposition().decode()
    assert counted(text) == {
        ("ttft", "met"): 2,
        ("ttft", "failed"): 1,
        ("itl", "missed"): 1,
        ("all", "met"): 1,
        ("all", "missed"): 1,
        ("all", "failed"): 1,
    }
    assert "baton_requests_without_slo_total 1.0" in text
    ratios = dict(re.findall(r'baton_slo_ratio_count\{target="(\w+)"\} (\S+)', text))
    assert ratios == {"ttft": "2.0", "itl": "1.0"}, "of answers; a refusal has no time"
    assert 'baton_slo_ratio_bucket{le="0.1",target="ttft"} 2.0' in text
    assert 'baton_slo_ratio_bucket{le="10.0",target="itl"} 0.0' in text


class FakeGeneration:
    """One prompt, one choice, a token at each call of `took`."""

    def __init__(self, record: Record) -> None:
        self.parts = [type("Part", (), {"plan": record.plan, "choices": [None]})]
        self.num_prompt_tokens, self.num_generated_tokens = 100, 0
        self.gathered, self.resumes = record.gathered, record.resumes


def predicted(predicted_s: float, real_s: float) -> str:
    """The metrics after one request."""
    example = answered(options=[option("decode-0", predicted_s, "prefill-0")])
    clock = Clock()
    metrics, record = RouterMetrics(lambda: None), Record("mine", "a-model", clock=clock)
    progress = Progress(metrics, Records(2**20), record, clock)
    generation = FakeGeneration(example)
    progress.planned(generation)  # type: ignore[arg-type]
    progress.started()
    clock.at += real_s
    generation.num_generated_tokens = 1
    progress.took(generation, [])  # type: ignore[arg-type]
    progress.ended(generation)  # type: ignore[arg-type]
    progress.close()
    return metrics.exposition().decode()


def test_tokens_that_come_together_share_the_time_since_the_last_ones():
    """1. Two of a choice at once.  2. 0.3 s later three.  3. 0.1 s later one.  4. An end without a token."""
    clock = Clock()
    metrics, record = RouterMetrics(lambda: None), Record("mine", "a-model", clock=clock)
    progress = Progress(metrics, Records(2**20), record, clock)
    generation = FakeGeneration(answered())
    progress.planned(generation)  # type: ignore[arg-type]
    for gap_s, tokens in ((0.2, 2), (0.3, 3), (0.1, 1), (0.5, 0)):
        clock.at += gap_s
        generation.num_generated_tokens += tokens
        piece = Piece(0, num_generated=tokens, finish_reason=None if tokens else "length")
        progress.took(generation, [(generation.parts[0], piece)])  # type: ignore[list-item]
    assert record.itl_s == pytest.approx(0.4 / 5)
    assert (record.gaps.max_s, record.gaps.quantile(0.5)) == pytest.approx((0.1, 0.1))
    text = metrics.exposition().decode()
    assert 'baton_inter_token_latency_seconds_count{model_name="a-model"} 5.0' in text
    [total_s] = re.findall(r'baton_inter_token_latency_seconds_sum\{model_name="a-model"\} (\S+)', text)
    assert float(total_s) == pytest.approx(0.4)


def test_the_error_of_an_estimate_is_a_metric_with_its_direction():
    text = predicted(0.3, 0.25)
    labels = 'plan="disaggregated"'
    assert f'baton_ttft_estimate_error_ratio_bucket{{le="0.15",{labels}}} 0.0' in text
    assert f'baton_ttft_estimate_error_ratio_bucket{{le="0.25",{labels}}} 1.0' in text
    [bias] = re.findall(r'estimate_bias_seconds_total\{direction="over",plan="disaggregated"\} (\S+)', text)
    assert float(bias) == pytest.approx(0.05)
    text = predicted(0.2, 0.25)
    [bias] = re.findall(r'estimate_bias_seconds_total\{direction="under",plan="disaggregated"\} (\S+)', text)
    assert float(bias) == pytest.approx(0.05)


@pytest.mark.parametrize(
    ("targets", "elapsed_s", "expected"),
    [
        (Targets(2.0, 0.05), 0.5, Targets(1.5, 0.05)),
        (Targets(2.0, 0.05), 7.0, Targets(0.001, 0.05)),
        (Targets(0.0, 0.05), 7.0, Targets(0.0, 0.05)),
    ],
)
def test_planning_gets_what_is_left_of_a_target(targets, elapsed_s, expected):
    assert left(targets, elapsed_s) == expected


def test_nothing_predicted_is_no_error():
    assert 'baton_ttft_estimate_error_ratio_count{plan="disaggregated"}' not in predicted(0.0, 0.25)


@pytest.mark.parametrize(
    ("error", "ending"),
    [
        (Overloaded("full"), "failed"),
        (Unavailable("nobody"), "failed"),
        (EngineFault("a step"), "failed"),
        (InvalidParameter("n", param="n"), "refused"),
    ],
)
def test_the_first_error_says_how_a_request_ended(error, ending):
    record = Record("mine", "a-model")
    progress = Progress(RouterMetrics(lambda: None), Records(2**20), record)
    progress.failed(error)
    progress.failed(EngineFault("another"))
    progress.close()
    assert (record.ending, record.http_status, record.error) == (ending, error.http_status, error.code)


async def test_of_a_header_that_is_sent_twice_the_first_counts(stack_of):
    async with stack_of() as stack:
        twice = [
            *((TTFT_HEADER, "250"), (TTFT_HEADER, "soon")),
            *(("X-Baton-Plan", "local"), ("X-Baton-Plan", "nowhere")),
            *(("X-Request-Id", "mine"), ("X-Request-Id", "other")),
        ]
        answer = await stack.http.post("/v1/completions", json={"prompt": "a"}, headers=twice)
        assert (answer.status_code, answer.headers["x-request-id"]) == (200, "mine")
        record = (await stack.http.get("/v1/requests/mine")).json()
        assert (record["targets"]["ttft_ms"], record["plan"]["reason"]) == (250, "forced_local")
