"""A request that goes on from elsewhere gets the tokens that it would have got there.

An uninterrupted run is the oracle; it is cut after any number of tokens of each choice, and what is left
is asked of another engine, with `Request.resumed`.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import pytest
from fake_matcher import Ascending
from hash_model import VOCAB, Harness, random_prompt
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_sets import native_kernels
from tiny_llama import tiny_runner

from core.clock import FakeClock
from core.request import (
    FinishReason,
    Grammar,
    PrefillTarget,
    Request,
    SamplingParams,
    TokenDelta,
    TokenLogprob,
)
from engine.block_pool import BlockPool
from engine.engine import Engine
from engine.kernels.torch_kernels import TorchKernels
from engine.messages import Abort, Add, Event, LoadFinished, LoadOrdered, LoadReport
from engine.scheduler import Scheduler
from engine.step import Limits

TARGET = PrefillTarget("p0", "127.0.0.1:1", "life")
PROMPT = tuple(random_prompt(37, 5))


@dataclass
class Choice:
    """What one choice has got."""

    tokens: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    finish: FinishReason | None = None

    def after(self, cut: int) -> Choice:
        return Choice(self.tokens[cut:], self.logprobs[cut:], self.finish)


def answers(events: list[Event], request_id: str) -> dict[int, Choice]:
    got: dict[int, Choice] = {}
    for event in events:
        if isinstance(event, TokenDelta) and event.request_id == request_id:
            choice = got.setdefault(event.index, Choice())
            choice.tokens += event.token_ids
            choice.logprobs += event.logprobs
            choice.finish = event.finish_reason or choice.finish
    return got


def cut_at(whole: dict[int, Choice], cuts: dict[int, int]) -> tuple[tuple[int, tuple[int, ...]], ...]:
    """`Request.resumed` of the choices that were not over after so many tokens."""
    return tuple(
        (index, tuple(choice.tokens[: cuts[index]]))
        for index, choice in whole.items()
        if cuts[index] < len(choice.tokens)
    )


def add(h: Any, request: Request) -> None:
    matcher = Ascending(VOCAB, 3, 40) if request.sampling.grammar else None
    h.engine.handle(Add(request, matcher=matcher))


# ---- a real model


class Worker:
    """An engine on a tiny Llama, with a neighbour that decodes beside whatever is asked."""

    def __init__(self, runner: Any) -> None:
        self.events: list[Event] = []
        limits = Limits(16, 512, 8, 32, 100)
        self.scheduler = Scheduler(BlockPool(64), limits, b"namespace", FakeClock())
        self.engine = Engine(self.scheduler, runner, self.events.extend, FakeClock())

    def run(self, request: Request) -> dict[int, Choice]:
        add(self, request)
        for _ in range(500):
            if not self.engine.step() and not self.scheduler.books.waiting:
                return answers(self.events, request.request_id)
        raise AssertionError("the engine did not come to rest")


@pytest.fixture(scope="module")
def runner(tmp_path_factory: pytest.TempPathFactory):
    return tiny_runner(native_kernels() or TorchKernels(), tmp_path_factory.mktemp("weights"))


STYLES: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "seeded": {},
    "filters": {"top_p": 0.9, "top_k": 20, "min_p": 0.01},
    "penalties": {"repetition_penalty": 1.2, "frequency_penalty": 0.5, "presence_penalty": 0.4},
    "greedy-penalties": {"temperature": 0.0, "repetition_penalty": 1.2, "frequency_penalty": 0.9},
    "logprobs": {"logprobs": 3},
    "two-choices": {"n": 2, "logprobs": 0, "frequency_penalty": 0.3},
    "min-tokens": {"min_tokens": 9, "stop_token_ids": frozenset(range(0, 97, 5))},
    "stop": {"stop_token_ids": frozenset(range(0, 97, 7))},
    "bias": {"logit_bias": ((5, 4.0), (9, -100.0)), "bad_words": ((5,), (11, 12))},
    "grammar": {"grammar": Grammar("", "format.x"), "repetition_penalty": 1.1},
    "grammar-of-two": {"grammar": Grammar("", "format.x"), "n": 2, "temperature": 2.0},
}


@pytest.mark.parametrize("style", STYLES)
def test_cut_anywhere_it_goes_on_as_if_it_had_not_been(runner, style: str) -> None:
    sampling = SamplingParams(**{"max_tokens": 14, "seed": 77} | STYLES[style])
    request = Request("r", PROMPT, sampling)
    whole = Worker(runner).run(request)
    longest = max(len(choice.tokens) for choice in whole.values())
    assert longest > 3
    for cut in range(1, longest):
        # The second choice is cut one token earlier: a step's deltas need not all have arrived.
        cuts = {index: max(0, cut - index) for index in whole}
        resumed = cut_at(whole, cuts)
        rest = Worker(runner).run(replace(request, request_id="r.1", epoch=1, resumed=resumed))
        assert rest == {index: whole[index].after(cuts[index]) for index, _ in resumed}, (cut, style)


def test_its_prompt_is_found_where_it_was_served_before(runner) -> None:
    worker, request = Worker(runner), Request("r", PROMPT, SamplingParams(max_tokens=14, seed=77))
    whole = worker.run(request)
    hits = worker.scheduler.admission.num_hit
    rest = worker.run(replace(request, request_id="r.1", resumed=cut_at(whole, {0: 9})))
    assert rest == {0: whole[0].after(9)}
    assert worker.scheduler.admission.num_hit == hits + 32


# ---- the books, on the hash model


@settings(max_examples=60, deadline=None)
@given(
    cuts=st.lists(st.integers(0, 30), min_size=1, max_size=4),
    length=st.integers(1, 70),
    tight=st.booleans(),
    caching=st.booleans(),
    window=st.sampled_from([0, 24]),
    busy=st.booleans(),
)
def test_any_cut_of_any_choice_on_any_pool(
    cuts: list[int], length: int, tight: bool, caching: bool, window: int, busy: bool
) -> None:
    """Also where choices have to be preempted, or can only run one after the other."""
    n, prompt = len(cuts), tuple(random_prompt(length, 3))
    request = Request("r", prompt, SamplingParams(max_tokens=30, seed=9, n=n, stop_token_ids=frozenset({7})))
    first = Harness(num_blocks=100, sliding_window=window)
    first.prompt_lens["r"] = length
    first.engine.handle(Add(request))
    first.run()
    whole = answers(first.events, "r")
    resumed = cut_at(whole, dict(enumerate(cuts)))
    if not resumed:
        return
    blocks = 14 if tight else 100
    second = Harness(
        num_blocks=blocks, caching=caching, sliding_window=window, max_num_seqs=3 if tight else 8
    )
    if busy:
        second.add("neighbour", random_prompt(20, 8), 40)
        second.step()
    second.prompt_lens["r"] = length
    second.engine.handle(Add(replace(request, resumed=resumed)))
    second.run()
    assert answers(second.events, "r") == {index: whole[index].after(len(got)) for index, got in resumed}
    assert all(e.gathered is None for e in second.events if isinstance(e, TokenDelta) and e.request_id == "r")
    second.assert_idle()


def _whole(prompt: tuple[int, ...], **given: Any) -> tuple[Request, dict[int, Choice]]:
    request = Request(
        "r", prompt, SamplingParams(**{"max_tokens": 20, "seed": 1, "temperature": 1.0} | given)
    )
    h = Harness()
    h.prompt_lens["r"] = len(prompt)
    h.engine.handle(Add(request))
    h.run()
    return request, answers(h.events, "r")


def test_the_choices_share_the_prompt_that_the_first_one_computes(harness) -> None:
    prompt = tuple(random_prompt(100, 2))
    request, whole = _whole(prompt, n=4)
    h = harness(max_num_batched_tokens=64)
    resumed = cut_at(whole, dict.fromkeys(range(4), 10))
    h.prompt_lens["r"] = 100
    h.engine.handle(Add(replace(request, resumed=resumed)))
    h.run()
    assert answers(h.events, "r") == {i: whole[i].after(10) for i in range(4)}
    rest_of_prompt, outputs = 100 - 96, 10 + 9  # the last token's KV is not computed
    assert h.runner.tokens_computed == 96 + 4 * (rest_of_prompt + outputs)


def test_it_goes_before_those_that_wait_and_is_not_the_one_preempted(harness) -> None:
    h = harness(max_num_seqs=1)
    request, whole = _whole(PROMPT)
    for name in ("running", "waiting"):
        h.add(name, random_prompt(9, 1), 6)
        h.step()
    for name in ("one", "two"):
        h.prompt_lens[name] = len(PROMPT)
        h.engine.handle(Add(replace(request, request_id=name, resumed=cut_at(whole, {0: 4}))))
    assert [seq.request_id for seq in h.scheduler.books.waiting] == ["one", "two", "waiting"]
    assert max(h.scheduler.books.waiting, key=lambda seq: seq.order).request_id == "waiting"
    h.run()
    assert answers(h.events, "one") == answers(h.events, "two") == {0: whole[0].after(4)}


def test_a_prefill_worker_is_asked_for_what_was_generated_too(harness) -> None:
    h = harness()
    request, whole = _whole(PROMPT)
    h.prompt_lens["r"] = len(PROMPT)
    h.engine.handle(Add(replace(request, prefill=TARGET, resumed=cut_at(whole, {0: 15}))))
    h.step()
    (order,) = [event for event in h.events if isinstance(event, LoadOrdered)]
    assert (order.first_block, len(order.block_ids), order.index, order.remote) == (0, 6, 0, True)
    h.engine.handle(LoadFinished(order.load_id, LoadReport(arrived=0)))
    h.run()
    assert answers(h.events, "r") == {0: whole[0].after(15)}


def test_one_choice_is_ended_while_another_goes_on(harness) -> None:
    request, whole = _whole(PROMPT, n=3)
    h = harness()
    h.prompt_lens["r"] = len(PROMPT)
    h.engine.handle(Add(replace(request, resumed=cut_at(whole, {0: 0, 1: 20, 2: 5}))))
    h.engine.handle(Abort("r", 0))
    h.run()
    assert answers(h.events, "r") == {2: whole[2].after(5)}
