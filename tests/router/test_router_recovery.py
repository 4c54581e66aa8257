"""A decode worker is lost, hangs or refuses: the answer goes on at another one, and the client sees none of it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import openai
import pytest
import structlog
from router_fakes import FakeWorker, Script, says

from core.errors import ContextLengthExceeded, EngineFault, Overloaded, Unavailable
from core.request import FinishReason, Request, TokenDelta
from planning.retry_budget import RetryBudget
from wire import codec
from wire.v1 import generation_pb2 as gen

IDS = list(range(600, 640))
WHOLE = says(IDS, finish=FinishReason.LENGTH)


class Stalls:
    """The first `tries` tries say `count` new tokens of each choice and stop there; later ones go to the end."""

    def __init__(self, count: int, tries: int = 1, whole: Script = WHOLE) -> None:
        self.count, self.tries, self.whole = count, tries, whole
        self.stalled: list[Request] = []

    async def __call__(self, request: Request) -> AsyncIterator[TokenDelta]:
        left = self.count * (len(request.resumed) or request.sampling.n)
        if request.epoch < self.tries and left == 0:
            await self._stall(request)
        async for delta in self.whole(request):
            yield delta
            left -= 1
            if request.epoch < self.tries and left == 0:
                await self._stall(request)

    async def _stall(self, request: Request) -> None:
        self.stalled.append(request)
        await asyncio.sleep(60)


async def ask(stack, stream: bool = False, **options):
    """The answer's text and token ids by choice, its finish reasons and usage."""
    options = {"model": stack.model, "prompt": [504, 505], "max_tokens": 12, **options}
    extra = {"return_token_ids": True, **options.pop("extra", {})}
    if not stream:
        answer = await stack.client.completions.create(**options, extra_body=extra)
        return {c.index: (c.text, c.token_ids, c.finish_reason) for c in answer.choices}, answer.usage
    events = await stack.client.completions.create(
        **options, extra_body=extra, stream=True, stream_options={"include_usage": True}
    )
    texts: dict[int, str] = {}
    ids: dict[int, list[int]] = {}
    finish: dict[int, str] = {}
    usage = None
    async for event in events:
        usage = event.usage or usage
        for c in event.choices:
            texts[c.index] = texts.get(c.index, "") + c.text
            ids.setdefault(c.index, []).extend(c.token_ids or [])
            if c.finish_reason:
                finish[c.index] = c.finish_reason
    return {i: (texts[i], ids[i], finish[i]) for i in texts}, usage


async def read(stream, into: list) -> None:
    """Read a stream to its end; what came before an error is kept."""
    async for event in stream:
        into += [event]


def running(stack) -> FakeWorker:
    """The worker with an open request."""
    (worker,) = [worker for worker in stack.workers if worker.open]
    return worker


def starts(stack) -> list[Request]:
    everything = [request for worker in stack.workers for request in worker.starts]
    return sorted(everything, key=lambda request: request.epoch)


def count(stack, line: str) -> float:
    """The value of a series; 0 where it has none."""
    for each in stack.router.metrics.exposition().decode().splitlines():
        if each.startswith(f"{line} "):
            return float(each.rpartition(" ")[2])
    return 0.0


def received(stack) -> float:
    """Tokens that have reached the router."""
    return count(stack, f'baton_generation_tokens_total{{model_name="{stack.model}"}}')


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.parametrize("cut", [0, 1, 5, 11])
async def test_lost_after_any_token(stack_of, cut: int, n: int, stream: bool):
    """1. An answer begins. 2. After `cut` tokens its worker is gone. 3. Another one makes the rest: the client
    gets what it would have got, each token once."""
    script = Stalls(cut)
    async with stack_of(WHOLE) as stack:
        undisturbed = await ask(stack, stream, n=n)
    async with stack_of(script, decode=2) as stack:
        with structlog.testing.capture_logs() as captured:
            asked = asyncio.create_task(ask(stack, stream, n=n))
            await stack.until(lambda: bool(script.stalled) and received(stack) == cut * n)
            await running(stack).stop()
            assert await asked == undisturbed
        first, second = starts(stack)
        assert (first.epoch, second.epoch) == (0, 1)
        assert first.request_id != second.request_id
        assert first.sampling == second.sampling
        assert second.resumed == (tuple((i, tuple(IDS[:cut])) for i in range(n)) if cut else ())
        await stack.until(lambda: count(stack, "baton_requests_in_flight") == 0)
    assert count(stack, 'baton_resumes_total{reason="worker_died"}') == 1
    (done,) = [line for line in captured if line["event"] == "request.done"]
    assert (done["resumes"], done["resume_reasons"], done["completion_tokens"]) == (1, "worker_died", 12 * n)
    (told,) = [line for line in captured if line["event"] == "request.resumed"]
    assert told["tokens"] == cut * n
    assert told["lost_worker"] != told["worker"]


async def test_only_the_choices_that_were_not_over_go_on(stack_of):
    """Of three choices the first has ended by a stop string, the second has no token yet."""

    async def script(request: Request) -> AsyncIterator[TokenDelta]:
        if request.epoch:
            async for delta in WHOLE(request):
                yield delta
            return
        for index, token_id in ((0, 600), (0, 601), (2, 600)):
            yield TokenDelta(request.request_id, index, (token_id,))
        stalled.set()
        await asyncio.sleep(60)

    stalled = asyncio.Event()
    async with stack_of(WHOLE) as stack:
        (text, *_), *_ = (await ask(stack, max_tokens=2))[0].values()
    async with stack_of(script, decode=2) as stack:
        asked = asyncio.create_task(ask(stack, n=3, max_tokens=4, stop=text.strip()[-3:]))
        await stalled.wait()
        await stack.until(lambda: bool(running(stack).cancels) and received(stack) == 3)
        await running(stack).stop()
        choices, usage = await asked
        assert starts(stack)[1].resumed == ((1, ()), (2, (600,)))
    assert [choices[i][1] for i in range(3)] == [IDS[:2]] * 3
    assert [choices[i][2] for i in range(3)] == ["stop"] * 3
    assert usage.completion_tokens == 6


@pytest.mark.parametrize("cut", [1, 2, 3])
async def test_a_stop_string_across_the_cut(stack_of, cut: int):
    async with stack_of(WHOLE) as stack:
        (text, *_), *_ = (await ask(stack, max_tokens=5))[0].values()
        stop = text[2:-1]
        undisturbed = await ask(stack, True, stop=stop)
        assert undisturbed[0][0][2] == "stop"
    script = Stalls(cut)
    async with stack_of(script, decode=2) as stack:
        asked = asyncio.create_task(ask(stack, True, stop=stop))
        await stack.until(lambda: bool(script.stalled))
        await running(stack).stop()
        assert await asked == undisturbed


async def test_log_probabilities_come_once(stack_of):
    """Those of the prompt and of the tokens that have come are not asked for again."""
    options = {"logprobs": 2, "echo": True, "prompt": [504, 505, 506]}

    async def logprobs(stack):
        answer = await stack.client.completions.create(model=stack.model, max_tokens=8, **options)
        return answer.choices[0].logprobs

    script = Stalls(3)
    async with stack_of(WHOLE) as stack:
        undisturbed = await logprobs(stack)
    async with stack_of(script, decode=2) as stack:
        asked = asyncio.create_task(logprobs(stack))
        await stack.until(lambda: bool(script.stalled))
        await running(stack).stop()
        assert await asked == undisturbed
        first, second = starts(stack)
        assert (first.sampling.prompt_logprobs, second.sampling.prompt_logprobs) == (True, False)
        assert second.sampling.logprobs == 2


async def test_the_sampling_is_the_same_also_where_the_seed_was_ours(stack_of):
    script = Stalls(4)
    async with stack_of(script, decode=2) as stack:
        extra = {"min_tokens": 6, "bad_words": ["x"], "repetition_penalty": 1.2}
        asked = asyncio.create_task(ask(stack, extra=extra, temperature=0.7, frequency_penalty=0.5))
        await stack.until(lambda: bool(script.stalled))
        await running(stack).stop()
        await asked
        first, second = starts(stack)
        assert first.sampling == second.sampling
        assert first.block_hashes == second.block_hashes


async def test_a_silent_worker_is_left_and_what_it_still_says_is_dropped(stack_of):
    """1. A worker's engine stops in mid-answer, its connection lives. 2. The answer goes on elsewhere; the old
    try is cancelled. 3. The old worker wakes up and goes on talking: nobody listens."""
    script = Stalls(3)
    async with stack_of(script, decode=2, step_timeout_s=2.0) as stack:
        asked = asyncio.create_task(ask(stack, True, max_tokens=30))
        await stack.until(lambda: bool(script.stalled))
        worker, old = running(stack), script.stalled[0]
        script.whole = says(IDS, finish=FinishReason.LENGTH, delay_s=0.02)
        session = stack.router.fleet.session(worker.incarnation)
        worker.change(idle_s=99.0)
        await stack.until(lambda: len(starts(stack)) == 2)
        for token_id in (1, 2, 3):
            late = TokenDelta(old.request_id, 0, (token_id,))
            session._dispatch(gen.SessionReply(deltas=[codec.delta_to_wire(late)]))
        choices, _ = await asked
        assert choices[0][1] == IDS[:30]
        await stack.until(lambda: worker.cancels == [(old.request_id, None)])
        assert not worker.open
    assert count(stack, 'baton_resumes_total{reason="worker_silent"}') == 1


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("error", [Unavailable("draining"), Overloaded("full")])
async def test_who_refuses_is_passed_over(stack_of, error, stream: bool):
    """Also one that says so only when asked. No client sees it, as long as another one takes the request."""

    async def script(request: Request) -> AsyncIterator[TokenDelta]:
        if request.epoch == 0:
            raise error
        async for delta in WHOLE(request):
            yield delta

    async with stack_of(script, decode=2) as stack:
        choices, _ = await ask(stack, stream)
        assert choices[0][1] == IDS[:12]
        assert {len(worker.starts) for worker in stack.workers} == {1}
    assert count(stack, f'baton_resumes_total{{reason="{error.code}"}}') == 1
    assert count(stack, "baton_poisoned_total") == 0


@pytest.mark.parametrize("error", [Unavailable("draining"), Overloaded("full")])
async def test_when_all_refuse_the_client_is_told(stack_of, error):
    async with stack_of(says(IDS, fail_at=0, error=error), decode=3) as stack:
        with pytest.raises(openai.APIStatusError) as caught:
            await ask(stack)
        assert (caught.value.status_code, caught.value.code) == (error.http_status, error.code)
        assert sorted(len(worker.starts) for worker in stack.workers) == [1, 1, 1]
    assert count(stack, 'baton_resumes_denied_total{why="no_worker"}') == 1


async def test_what_the_client_did_wrong_is_not_tried_again(stack_of):
    async with stack_of(says(IDS, fail_at=0, error=ContextLengthExceeded("too long")), decode=2) as stack:
        with pytest.raises(openai.BadRequestError):
            await ask(stack)
        assert len(starts(stack)) == 1


async def test_a_step_that_fails_is_tried_on_another_worker_and_no_third(stack_of):
    """1. A step fails with the request in it. 2. So it does on a second worker. 3. It is refused, though there
    are two more; the next request is served."""
    poison = EngineFault("the step failed")
    async with stack_of(says(IDS, fail_at=4, error=poison), decode=4) as stack:
        with pytest.raises(openai.InternalServerError) as caught:
            await ask(stack)
        assert (caught.value.status_code, caught.value.code) == (500, "request_poisoned")
        assert "two decode workers" in caught.value.message
        assert [request.epoch for request in starts(stack)] == [0, 1]
        for worker in stack.workers:
            worker.script = WHOLE
        assert (await ask(stack))[0][0][1] == IDS[:12]
    assert count(stack, "baton_poisoned_total") == 1
    assert count(stack, 'baton_resumes_denied_total{why="poisoned"}') == 1


async def test_a_fault_of_one_worker_is_nobodys_poison(stack_of):
    async def script(request: Request) -> AsyncIterator[TokenDelta]:
        fails = says(IDS, finish=FinishReason.LENGTH, fail_at=4, error=EngineFault("a bad step"))
        async for delta in fails(request) if request.epoch == 0 else WHOLE(request):
            yield delta

    async with stack_of(script, decode=2) as stack:
        choices, usage = await ask(stack, True)
        assert (choices[0][1], usage.completion_tokens) == (IDS[:12], 12)
    assert count(stack, 'baton_resumes_total{reason="engine_fault"}') == 1


async def test_two_workers_die_with_it(stack_of):
    """In mid-answer: the client gets what had come, one error event, and no [DONE]."""
    script = Stalls(3, tries=5)
    async with stack_of(script, decode=3) as stack:
        got: list = []
        stream = await stack.client.completions.create(
            model=stack.model, prompt="x", max_tokens=12, stream=True
        )
        asked = asyncio.create_task(read(stream, got))
        for death in (1, 2):
            await stack.until(lambda death=death: len(script.stalled) == death)
            await running(stack).stop()
        with pytest.raises(openai.APIError) as caught:
            await asked
        assert caught.value.code == "request_poisoned"
        assert sum(bool(choice.text) for event in got for choice in event.choices) <= 6
    assert count(stack, "baton_poisoned_total") == 1


async def test_a_request_that_gets_on_survives_more_deaths(stack_of):
    script = Stalls(17, tries=2)
    async with stack_of(script, decode=3) as stack:
        asked = asyncio.create_task(ask(stack, max_tokens=40))
        for death in (1, 2):
            await stack.until(lambda death=death: len(script.stalled) == death)
            await running(stack).stop()
        choices, usage = await asked
        assert (choices[0][1], usage.completion_tokens) == (IDS, 40)


async def test_the_shared_budget(stack_of):
    """The first resume is the request's own; the second is denied where the budget is spent."""
    async with stack_of(says(IDS, fail_at=0, error=Unavailable("draining")), decode=4) as stack:
        stack.router.retries = RetryBudget(share=0.0, floor=1)
        for expected in (3, 2):
            for worker in stack.workers:
                worker.starts.clear()
            with pytest.raises(openai.InternalServerError):
                await ask(stack)
            assert len(starts(stack)) == expected
    assert count(stack, 'baton_resumes_denied_total{why="budget"}') == 2


async def test_no_resumes(stack_of):
    script = Stalls(3)
    async with stack_of(script, decode=2, max_resumes=0) as stack:
        asked = asyncio.create_task(ask(stack))
        await stack.until(lambda: bool(script.stalled))
        await running(stack).stop()
        with pytest.raises(openai.InternalServerError) as caught:
            await asked
        assert caught.value.code == "worker_lost"
    assert count(stack, 'baton_resumes_denied_total{why="limit"}') == 1


async def test_the_only_worker_dies_and_comes_back(stack_of):
    """The client waits for it, as `baton serve` starts it again."""
    script = Stalls(3)
    async with stack_of(script) as stack:
        asked = asyncio.create_task(ask(stack, True))
        await stack.until(lambda: bool(script.stalled))
        await stack.worker.stop()
        await stack.until(lambda: stack.states() == {"decode-0": "lost"})
        await stack.worker.start()
        choices, usage = await asked
        assert (choices[0][1], usage.completion_tokens) == (IDS[:12], 12)


async def test_the_only_worker_does_not_come_back(stack_of):
    script = Stalls(3)
    async with stack_of(script, resume_timeout_s=0.5) as stack:
        asked = asyncio.create_task(ask(stack))
        await stack.until(lambda: bool(script.stalled))
        await stack.worker.stop()
        with pytest.raises(openai.InternalServerError) as caught:
            await asked
        assert caught.value.code == "worker_lost"
    assert count(stack, 'baton_resumes_denied_total{why="no_worker"}') == 1


async def test_a_client_that_leaves_while_it_looks(stack_of):
    script = Stalls(3)
    async with stack_of(script) as stack:
        asked = asyncio.create_task(ask(stack, True))
        await stack.until(lambda: bool(script.stalled))
        await stack.worker.stop()
        await stack.until(lambda: stack.states() == {"decode-0": "lost"})
        asked.cancel()
        await asyncio.gather(asked, return_exceptions=True)
        await stack.until(lambda: count(stack, "baton_requests_in_flight") == 0)
        await stack.worker.start()
        await stack.until(lambda: stack.states() == {"decode-0": "ready"})
        assert len(starts(stack)) == 1


async def test_one_prompt_is_lost_while_another_streams(stack_of):
    """1. Two prompts of one request run on two workers. 2. One is lost. 3. The other's tokens go on meanwhile."""
    stalls = Stalls(3, whole=says(IDS, finish=FinishReason.LENGTH, delay_s=0.01))

    async def script(request: Request) -> AsyncIterator[TokenDelta]:
        async for delta in stalls(request) if len(request.prompt_token_ids) == 1 else stalls.whole(request):
            yield delta

    async with stack_of(script, decode=2) as stack:
        asked = asyncio.create_task(ask(stack, True, prompt=[[504], [504, 505]], max_tokens=40))
        await stack.until(lambda: bool(stalls.stalled))
        lost = next(w for w in stack.workers if stalls.stalled[0].request_id in w.open)
        if len(lost.open) == 1:
            await lost.stop()
        choices, usage = await asyncio.wait_for(asked, 10)
        assert [choices[i][1] for i in (0, 1)] == [IDS, IDS]
        assert usage.completion_tokens == 80


async def test_a_cut_connection_to_the_only_worker(stack_of):
    """1. A message that nobody understands ends the session. 2. The same life is asked again, over a new one."""
    script = Stalls(3)
    async with stack_of(script) as stack:
        asked = asyncio.create_task(ask(stack, True))
        await stack.until(lambda: bool(script.stalled))
        stack.worker.say(TokenDelta(script.stalled[0].request_id, 0, (), (), "paused"))
        choices, _ = await asked
        assert choices[0][1] == IDS[:12]
        assert [request.epoch for request in stack.worker.starts] == [0, 1]


async def test_two_connections_that_were_cut_poison_nobody(stack_of):
    """Both lives turn out to go on, which takes a second or so to know."""
    script = Stalls(3, tries=2)
    async with stack_of(script, decode=2) as stack:
        asked = asyncio.create_task(ask(stack, True))
        for cut in (1, 2):
            await stack.until(lambda cut=cut: len(script.stalled) == cut)
            running(stack).say(TokenDelta(script.stalled[-1].request_id, 0, (), (), "paused"))
        choices, usage = await asyncio.wait_for(asked, 10)
        assert (choices[0][1], usage.completion_tokens) == (IDS[:12], 12)
    assert count(stack, "baton_poisoned_total") == 0
    assert count(stack, 'baton_resumes_total{reason="worker_died"}') == 2
