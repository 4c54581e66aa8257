"""Who waits, who overtakes, who is told no; and every count back to nothing afterwards (E3, E6)."""

from __future__ import annotations

import asyncio
from collections import Counter
from pathlib import Path

import httpx
import pytest
from router_fakes import says
from router_stack import Stack

from core.errors import ContextLengthExceeded
from core.request import Request

ONE_SEAT_TAKES = 2  # a worker of one seat is sent 1.5 sequences: it has room until it has two


class Held:
    """A script whose requests say a word each time `let` is called, and end."""

    def __init__(self) -> None:
        self._allowed = asyncio.Semaphore(0)

    async def __call__(self, request: Request):
        await self._allowed.acquire()
        async for delta in says([504])(request):
            yield delta

    def let(self, number: int = 1) -> None:
        for _ in range(number):
            self._allowed.release()


def ask(stack: Stack, marker: int, key: str = "", **body: object) -> asyncio.Task[httpx.Response]:
    """A request whose prompt is `marker`, so that a worker's `starts` tell who came."""
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    body = {"prompt": [marker], "max_tokens": 8} | body
    return asyncio.create_task(stack.http.post("/v1/completions", json=body, headers=headers))


def served(stack: Stack) -> list[int]:
    return [start.prompt_token_ids[0] for start in stack.worker.starts]


def waiting(stack: Stack) -> int:
    return stack.router.admission.waiting_room.num_waiting


def decode_workers(stack: Stack):
    assert stack.router.fleet is not None
    return stack.router.fleet.view().decode


async def fill(
    stack: Stack, number: int = ONE_SEAT_TAKES, key: str = ""
) -> list[asyncio.Task[httpx.Response]]:
    """Requests 1, 2 ..., on the worker."""
    tasks = [ask(stack, 1 + i, key) for i in range(number)]
    await stack.until(lambda: len(stack.worker.starts) == number)
    return tasks


async def line_up(stack: Stack, *requests: dict) -> list[asyncio.Task[httpx.Response]]:
    """Requests that wait, in this order."""
    tasks = []
    for request in requests:
        before = waiting(stack)
        tasks.append(ask(stack, **request))
        await stack.until(lambda before=before: waiting(stack) == before + 1)
    return tasks


async def sample(stack: Stack, name: str) -> float:
    text = (await stack.http.get("/metrics", headers={"Authorization": "Bearer ka"})).text
    return sum(float(line.rpartition(" ")[2]) for line in text.splitlines() if line.startswith(name))


async def at_rest(stack: Stack) -> None:
    """Nobody is in the router, and the gauges say so."""
    room = stack.router.admission.waiting_room
    await stack.until(lambda: not room.num_requests)
    assert (room.num_waiting, room.num_running_sequences, stack.router.admission._num_placed) == (0, 0, 0)
    assert await sample(stack, "baton_requests_queued ") == 0
    assert await sample(stack, "baton_requests_in_flight ") == 0


def keys_file(tmp_path: Path, **limits: str) -> str:
    """Keys a and b, ka and kb."""
    path = tmp_path / "keys.toml"
    path.write_text("".join(f'[keys.{n}]\nkey = "k{n}"\n{limits.get(n, "")}\n' for n in ("a", "b")))
    return str(path)


async def test_with_room_nobody_waits(stack_of):
    async with stack_of() as stack:
        answers = await asyncio.gather(*(ask(stack, 500 + i) for i in range(20)))
        assert {answer.status_code for answer in answers} == {200}
        assert await sample(stack, 'baton_admissions_total{decision="admitted",key="none"}') == 20
        assert await sample(stack, "baton_admissions_total") == 20
        await at_rest(stack)


async def test_a_full_queue_says_when_to_come_back(stack_of):
    """1. Two requests run, two wait.  2. The fifth is told no.  3. The others are answered in order."""
    held = Held()
    async with stack_of(held, seats=1, max_queued_requests=2) as stack:
        tasks = await fill(stack)
        tasks += await line_up(stack, {"marker": 3}, {"marker": 4})
        refused = await ask(stack, 5)
        assert refused.status_code == 429
        assert refused.json()["error"]["code"] == "overloaded"
        assert (refused.headers["retry-after"], refused.headers["retry-after-ms"]) == ("1", "1000")
        held.let(4)
        assert {(await task).status_code for task in tasks} == {200}
        assert served(stack) == [1, 2, 3, 4]
        assert await sample(stack, 'baton_admissions_total{decision="queue_full"') == 1
        assert await sample(stack, 'baton_admissions_total{decision="admitted_later"') == 2
        assert await sample(stack, "baton_router_queue_time_seconds_count") == 4
        await at_rest(stack)


async def test_the_load_that_others_bring_counts(stack_of):
    """A worker whose State says that it is full gets nothing more until it says otherwise."""
    async with stack_of(seats=2) as stack:
        stack.worker.change(running=3)
        await stack.until(lambda: decode_workers(stack)[0].load == 3)
        await asyncio.sleep(0.05)  # the last look at the room may be as old as this
        (task,) = await line_up(stack, {"marker": 9})
        assert served(stack) == []
        stack.worker.state.running = 0
        stack.worker.change(steps=1)
        assert (await task).status_code == 200


async def test_what_a_leaving_worker_still_has_takes_no_room(stack_of):
    """1. Three requests run on the one worker, which then drains.  2. The other one takes as many at once, and
    no more."""
    held = Held()
    async with stack_of(held, decode=2, seats=2) as stack:
        first, second = stack.workers
        second.change(phase="draining")
        await stack.until(lambda: stack.up() == 1)
        tasks = await fill(stack, 3)
        first.change(phase="draining")
        second.change(phase="ready")
        await stack.until(lambda: [w.worker_id for w in decode_workers(stack)] == ["decode-1"])
        tasks += [ask(stack, 10 + i) for i in range(4)]
        await stack.until(lambda: len(second.starts) == 3 and waiting(stack) == 1)
        held.let(7)
        assert {(await task).status_code for task in tasks} == {200}
        assert (len(first.starts), len(second.starts)) == (3, 4)
        await at_rest(stack)


async def test_priorities_overtake(stack_of, tmp_path):
    """a cannot ask for more than 0; b can."""
    keys = keys_file(tmp_path, a="priority_floor = 0")
    held = Held()
    async with stack_of(held, seats=1, api_keys_file=keys) as stack:
        tasks = await fill(stack, key="kb")
        tasks += await line_up(
            stack,
            {"marker": 10, "key": "kb", "priority": 5},
            {"marker": 11, "key": "kb"},
            {"marker": 12, "key": "kb", "priority": -5},
            {"marker": 13, "key": "ka", "priority": -100},
            {"marker": 14, "key": "kb", "priority": -1},
        )
        for number in range(1, 8):
            held.let()
            await stack.until(lambda number=number: len(served(stack)) == min(7, 2 + number))
        assert {(await task).status_code for task in tasks} == {200}
        assert served(stack)[2:] == [12, 14, 11, 13, 10]
        for bad in (101, -101, "high", 1.5):
            assert (await ask(stack, 1, "kb", priority=bad)).json()["error"]["param"] == "priority"
        await at_rest(stack)


async def test_keys_share_evenly_under_load(stack_of, tmp_path):
    """1. a has 12 requests waiting, then b comes with 6.  2. While both wait they are served alike, within a
    quantum of two requests, and each in its order.  3. b, with twice the weight, gets twice as much."""
    for weight, quantum in ((1, 2), (2, 4)):
        held = Held()
        keys = keys_file(tmp_path, b=f"weight = {weight}")
        async with stack_of(held, seats=1, api_keys_file=keys) as stack:
            tasks = await fill(stack, key="ka")
            cost = {"max_tokens": 212}
            a = [{"marker": 0, "key": "ka"} | cost | {"prompt": [100 + i] * 300} for i in range(12)]
            b = [{"marker": 0, "key": "kb"} | cost | {"prompt": [200 + i] * 300} for i in range(6)]
            tasks += await line_up(stack, *a, *b)
            for number in range(1, 21):
                held.let()
                await stack.until(lambda number=number: len(served(stack)) == min(20, 2 + number))
            assert {(await task).status_code for task in tasks} == {200}
            order = served(stack)[2:]
            assert [x for x in order if x < 200] == [100 + i for i in range(12)]
            assert [x for x in order if x >= 200] == [200 + i for i in range(6)]
            both = order[: order.index(205)]
            for end in range(len(both)):
                got = Counter("b" if x >= 200 else "a" for x in both[:end])
                assert abs(got["a"] * weight - got["b"]) <= quantum + weight, both
            await at_rest(stack)


async def test_a_flood_does_not_take_the_other_keys_place(stack_of, tmp_path):
    """The queue is full of a's requests; b's comes and a's newest goes."""
    held = Held()
    async with stack_of(held, seats=1, max_queued_requests=3, api_keys_file=keys_file(tmp_path)) as stack:
        tasks = await fill(stack, key="ka")
        flood = await line_up(stack, *({"marker": 10 + i, "key": "ka"} for i in range(3)))
        theirs = ask(stack, 20, "kb")
        displaced = await flood.pop()
        assert (displaced.status_code, displaced.headers["retry-after"]) == (429, "1")
        held.let(5)
        assert {(await task).status_code for task in (*tasks, *flood, theirs)} == {200}
        assert sorted(served(stack)) == [1, 2, 10, 11, 20]
        await at_rest(stack)


async def test_a_key_has_so_many_at_once(stack_of, tmp_path):
    held = Held()
    async with stack_of(held, api_keys_file=keys_file(tmp_path, a="max_concurrent = 2")) as stack:
        tasks = await fill(stack, key="ka")
        refused = await ask(stack, 3, "ka")
        assert refused.status_code == 429
        assert "API key a has 2 requests" in refused.json()["error"]["message"]
        assert refused.headers["retry-after"] == "1"
        tasks.append(ask(stack, 4, "kb"))
        held.let(3)
        assert {(await task).status_code for task in tasks} == {200}
        again = ask(stack, 5, "ka")
        held.let()
        assert (await again).status_code == 200
        await at_rest(stack)


async def test_a_key_has_so_many_tokens_a_minute(stack_of, tmp_path):
    """Charged by what it may cost, billed by what it had: 10 + 2 of the 110 that were asked for."""
    limit = "max_tokens_per_minute = 120"
    async with stack_of(api_keys_file=keys_file(tmp_path, a=limit)) as stack:
        body = {"prompt": [7] * 10, "max_tokens": 100}
        assert (await ask(stack, 0, "ka", **body)).json()["usage"]["total_tokens"] == 13
        refused = await ask(stack, 0, "ka", **body)
        assert refused.status_code == 429
        wait_ms = int(refused.headers["retry-after-ms"])
        assert 500 <= wait_ms <= 1500, "3 tokens are missing, at 2 a second"
        assert int(refused.headers["retry-after"]) == -(-wait_ms // 1000)
        assert (await ask(stack, 0, "kb", **body)).status_code == 200
        assert (await ask(stack, 0, "ka", **body | {"max_tokens": 50})).status_code == 200
        assert await sample(stack, 'baton_key_tokens_total{key="a"}') == 26
        await at_rest(stack)


async def test_who_leaves_while_it_waits_leaves_at_once(stack_of):
    held = Held()
    async with stack_of(held, seats=1) as stack:
        tasks = await fill(stack)
        gone, stays = await line_up(stack, {"marker": 8}, {"marker": 9})
        gone.cancel()
        await stack.until(lambda: waiting(stack) == 1)
        held.let(3)
        assert {(await task).status_code for task in (*tasks, stays)} == {200}
        assert served(stack) == [1, 2, 9]
        assert await sample(stack, "baton_client_disconnects_total") == 1
        await at_rest(stack)


async def test_nobody_waits_for_ever(stack_of):
    held = Held()
    async with stack_of(held, seats=1, queue_timeout_s=0.15) as stack:
        tasks = await fill(stack)
        late = await ask(stack, 3)
        assert (late.status_code, late.headers["retry-after"]) == (429, "1")
        assert "0.15 s" in late.json()["error"]["message"]
        held.let(2)
        assert {(await task).status_code for task in tasks} == {200}
        assert await sample(stack, 'baton_admissions_total{decision="queue_timeout"') == 1
        await at_rest(stack)


async def test_all_counts_come_back(stack_of, tmp_path):
    """Waves of requests of which some are answered, cancelled in either state, refused, timed out, bad."""
    held = Held()
    keys = keys_file(tmp_path, a="max_concurrent = 9", b="max_tokens_per_minute = 2000")
    settings = {"max_queued_requests": 5, "queue_timeout_s": 0.3, "api_keys_file": keys}
    async with stack_of(held, seats=2, **settings) as stack:
        seen: Counter[int] = Counter()
        for wave in range(4):
            tasks = [ask(stack, i, "kb" if i % 3 else "ka", n=1 + i % 2, priority=i % 4) for i in range(24)]
            tasks += [ask(stack, 1, "ka", max_tokens=10**6), ask(stack, 1, "ka", n=0)]
            await asyncio.sleep(0.1)
            for task in tasks[wave::5]:
                task.cancel()
            held.let(9)
            await asyncio.sleep(0.1)
            for task in tasks[wave + 1 :: 5]:
                task.cancel()
            held.let(100)
            for answer in await asyncio.gather(*tasks, return_exceptions=True):
                if isinstance(answer, httpx.Response):
                    seen[answer.status_code] += 1
            await at_rest(stack)
            held = stack.worker.script = Held()
        assert {200, 400, 429} == seen.keys()


async def test_a_target_out_of_reach_is_a_no_at_once(stack_of):
    """A prompt takes this worker seconds; who wants its first token within 50 ms is told so, and who has more
    time, or no target, is answered."""
    async with stack_of() as stack:
        stack.worker.state.prefill_model.a, stack.worker.state.prefill_model.b = 0.001, 0.01
        stack.worker.change(steps=1)
        body = {"prompt": [7] * 400, "max_tokens": 4}
        slow = "X-Baton-Predicted-TTFT-MS"

        async def predicted() -> httpx.Response:
            return await stack.http.post("/v1/completions", json=body)

        while float((await predicted()).headers[slow]) < 2000:
            await asyncio.sleep(0.02)
        starts = len(stack.worker.starts)
        refused = await stack.http.post("/v1/completions", json=body, headers={"X-Baton-TTFT-SLO-MS": "50"})
        assert refused.status_code == 429
        assert "0.05 s" in refused.json()["error"]["message"]
        assert int(refused.headers["retry-after-ms"]) >= 2000
        assert int(refused.headers["retry-after"]) == -(-int(refused.headers["retry-after-ms"]) // 1000)
        assert len(stack.worker.starts) == starts
        easy = await stack.http.post("/v1/completions", json=body, headers={"X-Baton-TTFT-SLO-MS": "60000"})
        assert easy.status_code == 200
        assert await sample(stack, 'baton_admissions_total{decision="ttft_slo"') == 1
        await at_rest(stack)


async def test_nothing_ready_says_when_to_come_back(stack_of):
    async with stack_of() as stack:
        stack.worker.change(phase="draining")
        await stack.until(lambda: not stack.up())
        answer = await ask(stack, 1)
        assert (answer.status_code, answer.headers["retry-after"]) == (503, "1")
        assert answer.headers["retry-after-ms"] == "1000"
        await at_rest(stack)


@pytest.mark.parametrize("where", ["router", "worker"])
async def test_what_clients_do_wrong_breaks_nothing(stack_of, where):
    """Twenty requests that are too long, by the router's count or by the worker's own, then a good one."""
    error = ContextLengthExceeded("the prompt is too long", param="prompt") if where == "worker" else None
    async with stack_of(says([504], fail_at=0, error=error), blocks=16) as stack:
        body = {"prompt": [504] * (300 if where == "router" else 20)}
        for _ in range(20):
            answer = await stack.http.post("/v1/completions", json=body)
            assert (answer.status_code, answer.json()["error"]["code"]) == (400, "context_length_exceeded")
        stack.worker.script = says([504])
        assert (await ask(stack, 504)).status_code == 200
        assert stack.states() == {"decode-0": "ready"}
        assert await sample(stack, "baton_faults_total") == 0
        assert len(stack.worker.starts) == (1 if where == "router" else 21)
        await at_rest(stack)
