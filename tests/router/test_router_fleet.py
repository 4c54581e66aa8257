"""Workers as the router sees them: states, compatibility, what the planner gets (C7, E1, F8)."""

from __future__ import annotations

import asyncio
from collections import Counter
from math import inf
from typing import Any

import openai
import pytest
from router_fakes import FakeWorker, fingerprint, says
from router_stack import stacked

from core.errors import Unavailable
from planning.estimate import Targets
from planning.plan import Forced
from planning.worker_view import Sent
from services.router.planner import planned
from services.router.roster import Roster
from services.router.schemas import CompletionBody
from services.router.standing import WorkerState
from services.router.text import Prompt
from wire import codec
from wire.v1 import worker_pb2 as pb

PRINT = fingerprint("tok")
VARIED = {
    "model_digest": "other",
    "tokenizer_digest": "other",
    "num_layers": 31,
    "num_kv_heads": 4,
    "head_dim": 32,
    "block_size": 32,
    "kv_dtype": "bf16",
    "rope": "linear:2/100000",
    "max_model_len": 4096,
    "layout_version": 2,
    "protocol_version": 2,
}


def hello(role="decode", print_=PRINT, worker_id="w", blocks=100) -> pb.Hello:
    wire_print = codec.fingerprint_to_wire(print_)
    return pb.Hello(
        worker_id=worker_id, incarnation="1", role=role, fingerprint=wire_print, total_blocks=blocks
    )


def roster(*hellos: pb.Hello) -> Roster:
    book = Roster("tok", silence_s=10)
    for number, each in enumerate(hellos):
        address = f"h:{number}"
        book.add(address)
        each.incarnation = str(number)
        book.hello(address, each, now=0)
        book.state(address, pb.State(phase="ready"), now=0)
    return book


def status(book: Roster, number: int, now: float = 1.0):
    return book.status(book.members[f"h:{number}"], now)


def test_life_of_a_worker():
    """1. Discovered.  2. Hello and State: ready.  3. Drains.  4. Its stream ends."""
    book = Roster("tok", silence_s=10)
    book.add("h:0")
    assert status(book, 0)[0] is WorkerState.CONNECTING
    book.hello("h:0", hello(), now=0)
    assert status(book, 0)[0] is WorkerState.CONNECTING
    book.state("h:0", pb.State(phase="ready"), now=0)
    assert status(book, 0) == (WorkerState.READY, "")
    assert [w.worker_id for w in book.fleet_view(1).decode] == ["w"]
    book.state("h:0", pb.State(phase="draining"), now=1)
    assert status(book, 0)[0] is WorkerState.DRAINING
    assert book.fleet_view(1).decode == ()
    assert book.lost("h:0", "reset")
    assert not book.lost("h:0", "refused")
    assert status(book, 0) == (WorkerState.LOST, "refused")


@pytest.mark.parametrize("field", VARIED)
def test_each_differing_field_is_named_and_not_routed_to(field):
    odd = fingerprint("tok", **{field: VARIED[field]})
    for role in ("prefill", "decode"):
        book = roster(hello(), hello(), hello(role, odd))
        state, reason = status(book, 2)
        assert state is WorkerState.INCOMPATIBLE
        assert reason.startswith(field)
        assert len(book.fleet_view(1).decode) == 2
    prefill = roster(hello(), hello("prefill", odd)).fleet_view(1).prefill
    assert [w.fingerprint for w in prefill] == [odd]


def test_majority_wins_and_the_dead_do_not_vote():
    odd = fingerprint("tok", block_size=32)
    book = roster(hello(print_=odd), hello(), hello())
    assert [status(book, i)[0].value for i in range(3)] == ["incompatible", "ready", "ready"]
    for address in ("h:1", "h:2"):
        book.lost(address, "gone")
    assert status(book, 0)[0] is WorkerState.READY


def test_silence_is_no_state_or_an_engine_that_does_not_turn():
    book = roster(hello())
    assert status(book, 0, now=9)[0] is WorkerState.READY
    assert status(book, 0, now=11)[0] is WorkerState.SILENT
    for work in (0, 1):  # an engine that died without work tells of none ever after
        book.state("h:0", pb.State(phase="ready", idle_s=9, running=work), now=20)
        assert status(book, 0, now=21)[0] is WorkerState.READY
        book.state("h:0", pb.State(phase="ready", idle_s=11, running=work), now=20)
        assert status(book, 0, now=21) == (WorkerState.SILENT, "its engine has not moved for 11 s")


def seen(book: Roster, now: float = 2.0) -> tuple[int, int, int]:
    """Sequences, tokens to compute and context of the one decode worker, as the planner sees it."""
    [worker] = book.fleet_view(now).decode
    return worker.load, worker.queued_tokens, worker.context_tokens


def test_load_counts_what_no_state_counts_yet():
    """1. Two are sent. 2. States that count neither, one, both, however late. 3. Both are over."""
    book = roster(hello())
    book.assigned("r", {"0": Sent(2, 300, 600), "unknown": Sent(1)})
    assert seen(book) == (2, 300, 600)
    book.state("h:0", pb.State(phase="ready"), now=1)
    book.assigned("s", {"0": Sent(1, 10, 20)})
    assert seen(book) == (3, 310, 620)
    busy: dict[str, Any] = {"running": 2, "queued_tokens": 44, "context_tokens": 600}
    book.state("h:0", pb.State(phase="ready", taken=["r", "another router's"], **busy), now=2)
    assert seen(book) == (3, 54, 620)
    book.state("h:0", pb.State(phase="ready", taken=["s"], **busy), now=3)
    assert seen(book) == (2, 44, 600)
    book.state("h:0", pb.State(phase="ready"), now=4)
    assert seen(book) == (0, 0, 0)


def test_what_is_over_counts_no_more_whatever_the_last_state_says():
    book = roster(hello())
    book.assigned("unseen", {"0": Sent(1, 300, 310)})
    book.ended("unseen", {"0": Sent(tokens=300)})
    assert seen(book) == (1, 0, 310)
    book.ended("unseen", {"0": Sent(1, 0, 310)})
    assert seen(book) == (0, 0, 0)
    book.assigned("seen", {"0": Sent(1, 900, 910)})
    state = pb.State(phase="ready", running=2, queued_tokens=256, context_tokens=1500, taken=["seen"])
    book.state("h:0", state, now=1)
    book.ended("seen", {"0": Sent(tokens=900)})
    book.ended("seen", {"0": Sent(1, 0, 910)})
    assert seen(book) == (1, 0, 590)
    book.state("h:0", pb.State(phase="ready", running=1, queued_tokens=80, context_tokens=600), now=2)
    assert seen(book) == (1, 80, 600)


def test_what_a_prefill_worker_has_built_is_in_its_state():
    book = roster(hello(), hello("prefill"))
    book.state("h:1", pb.State(phase="ready", running=1, queued_tokens=500, taken=["built"]), now=1)
    book.assigned("never asked", {"1": Sent(1, 70)})
    [worker] = book.fleet_view(2).prefill
    assert (worker.load, worker.queued_tokens) == (2, 570)
    for name in ("built", "never asked"):
        book.ended(name, {"1": Sent(1, 70)})
    [worker] = book.fleet_view(2).prefill
    assert (worker.load, worker.queued_tokens) == (1, 500)


def test_when_the_step_that_runs_began():
    book = roster(hello())
    book.state("h:0", pb.State(phase="ready", running=1, step_s=0.25), now=5)
    view = book.fleet_view(6)
    assert (view.now, view.decode[0].step_began_at) == (6, 4.75)
    book.state("h:0", pb.State(phase="ready"), now=7)
    book.assigned("r", {"0": Sent(1, 300)})
    assert book.fleet_view(8).decode[0].step_began_at == inf, "what it was sent has not begun"


def test_the_way_to_a_worker_is_the_usual_one():
    book = roster(hello())
    for way_s in (0.002, 0.002, 3.0) * 100:
        book.answered("0", way_s)
    assert book.fleet_view(2).decode[0].way_s == pytest.approx(0.002, rel=0.2)
    book.answered("gone", 1.0)


def test_what_a_lost_worker_was_sent_is_gone_with_it():
    book = roster(hello())
    book.assigned("r", {"0": Sent(2, 300, 600)})
    book.lost("h:0", "reset")
    book.assigned("s", {"0": Sent(2, 300, 600)})
    book.hello("h:0", hello(), now=2)
    book.state("h:0", pb.State(phase="ready"), now=2)
    assert seen(book) == (0, 0, 0)


async def test_a_request_counts_until_it_is_over(stack_of):
    """1. It runs, and no State has counted it. 2. It is over, and none says so."""
    async with stack_of(says([504] * 5, delay_s=0.02)) as stack:
        asked = asyncio.create_task(stack.client.completions.create(model=stack.model, prompt="x"))
        await stack.until(lambda: bool(stack.worker.open))
        assert [worker.load for worker in stack.router.fleet.view().decode] == [1]
        await asked
        [worker] = stack.router.fleet.view().decode
        assert (worker.load, worker.queued_tokens, worker.context_tokens) == (0, 0, 0)
        stack.worker.script = says([504] * 5, delay_s=0.02, fail_at=2, error=Unavailable("planted"))
        with pytest.raises(openai.APIError):
            await stack.client.completions.create(model=stack.model, prompt="x")
        assert [worker.load for worker in stack.router.fleet.view().decode] == [0]


async def test_plans_reach_the_worker_and_the_headers(stack_of, text):
    prompt = "The quick brown fox jumps over the lazy dog. " * 20
    async with stack_of(prefill=1) as stack:

        async def ask(plan: str | None = None, prompt: str | list[int] = prompt):
            headers = {"X-Baton-Plan": plan} if plan else {}
            body = {"model": stack.model, "prompt": prompt}
            return await stack.http.post("/v1/completions", json=body, headers=headers)

        seen = []
        plans = ((None, prompt), (None, "short"), ("local", prompt), ("disaggregated", [504] * 17))
        for plan, text_ in plans:
            answer = await ask(plan, text_)
            assert answer.status_code == 200
            names = ("plan", "reason", "prefill", "decode")
            seen.append(tuple(answer.headers[f"x-baton-{name}"] for name in names))
        assert seen == [
            ("disaggregated", "cheapest_pair", "prefill-0", "decode-0"),
            ("local", "short_prompt", "none", "decode-0"),
            ("local", "forced_local", "none", "decode-0"),
            ("disaggregated", "forced_disaggregated", "prefill-0", "decode-0"),
        ]
        first = stack.worker.starts[0]
        peer = stack.workers[1]
        assert first.prefill.worker_id == "prefill-0"
        assert (first.prefill.address, first.prefill.incarnation) == (peer.address, peer.incarnation)
        assert len(first.block_hashes) == len(first.prompt_token_ids) // 16
        assert stack.worker.starts[2].prefill is None
        for bad in (await ask("sideways"), await ask("disaggregated", [504] * 16)):
            assert (bad.status_code, bad.json()["error"]["param"]) == (400, "X-Baton-Plan")


async def test_router_ids_are_the_workers_ids_for_fifty_bodies(stack_of, text):
    from core.blocks import hash_blocks

    async with stack_of() as stack:
        expected = []
        for i in range(25):
            said = f"Message {i} with 삼겹살 🦊, <|im_end|> and {'long ' * i}text"
            expected.append(text.tokenizer.encode(said))
            body = {"model": stack.model, "prompt": said, "cache_salt": str(i)}
            assert (await stack.http.post("/v1/completions", json=body)).status_code == 200
            messages = [{"role": "user", "content": said}]
            rendered = await stack.http.post("/tokenize", json={"messages": messages})
            expected.append(rendered.json()["tokens"])
            body = {"model": stack.model, "messages": messages, "cache_salt": str(i)}
            assert (await stack.http.post("/v1/chat/completions", json=body)).status_code == 200
        got = [list(s.prompt_token_ids) for s in stack.worker.starts]
        assert got == expected
        assert all(ids.count(2) == 2 for ids in got[1::2])  # the template's turn ends, not the user's text
        for request in stack.worker.starts:
            namespace = stack.worker.print.namespace
            assert list(request.block_hashes) == hash_blocks(
                namespace, request.prompt_token_ids, 16, request.cache_salt
            )


async def test_a_wrong_block_size_is_refused_and_shown(text):
    good = fingerprint(text.tokenizer_digest)
    workers = [
        FakeWorker(good),
        FakeWorker(fingerprint(text.tokenizer_digest, block_size=32), worker_id="p", role="prefill"),
    ]
    async with stacked(text, workers, wait=False) as stack:
        await stack.until(lambda: stack.states() == {"decode-0": "ready", "p": "incompatible"})
        ready = await stack.http.get("/ready")
        assert ready.status_code == 200
        assert "block_size" in ready.json()["problems"][0]
        prompt = [504] * 200
        answer = await stack.http.post("/v1/completions", json={"model": stack.model, "prompt": prompt})
        assert answer.headers["x-baton-reason"] == "no_compatible_prefill"
        forced = await stack.http.post(
            "/v1/completions",
            json={"model": stack.model, "prompt": prompt},
            headers={"X-Baton-Plan": "disaggregated"},
        )
        assert (forced.status_code, forced.json()["error"]["code"]) == (503, "unavailable")


async def test_another_tokenizer_is_never_ready(text):
    async with stacked(text, [FakeWorker(fingerprint("another"))], wait=False) as stack:
        await stack.until(lambda: stack.states() == {"decode-0": "incompatible"})
        answer = await stack.http.get("/ready")
        assert answer.status_code == 503
        assert any("tokenizer_digest" in problem for problem in answer.json()["problems"])
        with pytest.raises(openai.InternalServerError):
            await stack.client.completions.create(model=stack.model, prompt="x")


async def test_two_workers_of_one_id_keep_their_own_requests(text):
    """1. Two containers call their workers `w`.  2. Requests spread over both.  3. One dies: its request goes on
    at the other, whose own is not disturbed."""
    print_ = fingerprint(text.tokenizer_digest)
    twins = [FakeWorker(print_, says([504] * 9, delay_s=0.1), worker_id="w") for _ in range(2)]
    async with stacked(text, twins, wait=False) as stack:
        await stack.until(lambda: stack.up() == 2)
        ask = stack.client.completions.create
        asked = [asyncio.create_task(ask(model=stack.model, prompt="x")) for _ in range(2)]
        await stack.until(lambda: all(len(twin.open) == 1 for twin in twins))
        await twins[0].stop()
        for answer in await asyncio.gather(*asked):
            assert answer.usage.completion_tokens == 10
        assert [request.epoch for request in twins[1].starts] == [0, 1]


async def test_a_worker_that_left_between_the_plan_and_the_start_is_replaced(stack_of, monkeypatch):
    async with stack_of(decode=2) as stack:
        fleet, asked = stack.router.fleet, []
        session = fleet.session

        def gone_at_first(incarnation: str):
            asked.append(incarnation)
            return None if len(asked) == 1 else session(incarnation)

        monkeypatch.setattr(fleet, "session", gone_at_first)
        answer = await stack.client.completions.create(model=stack.model, prompt=["x", "y"])
        assert [choice.text for choice in answer.choices] == [answer.choices[0].text] * 2
        assert sum(len(worker.starts) for worker in stack.workers) == 2


async def test_many_prompts_are_planned_in_turn_with_others(text):
    """The loop turns between two prompts, and each sees the load of those before it."""
    workers = [FakeWorker(fingerprint(text.tokenizer_digest), worker_id=f"d{i}") for i in range(2)]
    async with stacked(text, workers) as stack:
        body = CompletionBody(prompt=[[504]] * 8, max_tokens=1)
        prompts = [Prompt((504,))] * 8
        turns = 0

        async def count() -> None:
            nonlocal turns
            while True:
                turns += 1
                await asyncio.sleep(0)

        counting = asyncio.create_task(count())
        plans = await planned(stack.router, body, prompts, Forced.AUTO, Targets())
        counting.cancel()
        assert turns >= 7
        assert Counter(chosen.decode.worker_id for _, chosen in plans) == {"d0": 4, "d1": 4}


async def test_a_silent_worker_loses_its_requests(stack_of):
    async with stack_of(says([504], delay_s=60), step_timeout_s=2, resume_timeout_s=0) as stack:
        asked = asyncio.create_task(stack.client.completions.create(model=stack.model, prompt="x"))
        await stack.until(lambda: bool(stack.worker.open))
        stack.worker.change(running=1, idle_s=30.0)
        with pytest.raises(openai.InternalServerError, match="does not answer"):
            await asked
        assert stack.states() == {"decode-0": "silent"}
        await stack.until(lambda: not stack.worker.open)


async def test_draining_finishes_old_requests_and_takes_no_new_ones(stack_of, text):
    ids = text.tokenizer.encode("one two three four five six seven")
    async with stack_of(says(ids, delay_s=0.02), decode=2) as stack:
        running = asyncio.create_task(stack.client.completions.create(model=stack.model, prompt="x"))
        await stack.until(lambda: any(w.open for w in stack.workers))
        busy = next(w for w in stack.workers if w.open)
        other = next(w for w in stack.workers if w is not busy)
        busy.change(phase="draining")
        await stack.until(lambda: "draining" in stack.states().values())
        for _ in range(5):
            await stack.client.completions.create(model=stack.model, prompt="x")
        assert (await running).choices[0].finish_reason == "stop"
        assert len(busy.starts) == 1
        assert len(other.starts) == 5


async def test_prompts_of_one_request_spread_too(stack_of):
    async with stack_of(says([504] * 5, delay_s=0.05), decode=4) as stack:
        await stack.client.completions.create(model=stack.model, prompt=["x"] * 40)
        assert [len(w.starts) for w in stack.workers] == [10] * 4


async def test_what_is_refused_is_no_plan_and_no_load(stack_of):
    async with stack_of(blocks=16) as stack:
        fits, too_long = [504] * 10, [504] * 300
        with pytest.raises(openai.BadRequestError):
            await stack.client.completions.create(model=stack.model, prompt=[fits, too_long, fits])
        assert "baton_plans_total{" not in stack.router.metrics.exposition().decode()
        assert [w.load for w in stack.router.fleet.view().decode] == [0]
        await stack.client.completions.create(model=stack.model, prompt=[fits, fits])
        lines = stack.router.metrics.exposition().decode()
        assert 'baton_plans_total{plan="local",reason="no_prefill_worker"} 2.0' in lines


async def test_load_spreads_over_equal_workers(stack_of):
    async with stack_of(says([504] * 5, delay_s=0.05), decode=4) as stack:
        ask = stack.client.completions.create
        await asyncio.gather(*(ask(model=stack.model, prompt="x") for _ in range(40)))
        counts = sorted(len(w.starts) for w in stack.workers)
        assert counts[-1] <= 2 * counts[0]
