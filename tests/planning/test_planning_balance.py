"""Hits are worth something and nobody is overrun: the rule as tables, then as a fleet under load (E4)."""

from __future__ import annotations

import random
from collections import Counter, deque
from dataclasses import replace

import pytest

from core.kv import Fingerprint
from core.step_model import StepModel
from planning.balance import fade, sequence_s
from planning.estimate import Targets
from planning.plan import Forced, Plan, RequestFacts, plan
from planning.prefix_index import Changes, PrefixIndex
from planning.worker_view import FleetView, WorkerView

PRINT = Fingerprint("m", "t", 30, 3, 64, 16, "fp32", "default/100000", 4096)
MODEL = StepModel(a=0.0, b=0.001, num_steps=9)


def views(count: int, **changes: object) -> tuple[WorkerView, ...]:
    one = WorkerView("", "", "", PRINT, 256, prefill_model=MODEL)
    return tuple(
        replace(one, worker_id=str(i), address=f"w:{i}", incarnation=str(i), **changes) for i in range(count)
    )


def decide(tokens: int, fleet: FleetView, forced: Forced, rng: random.Random) -> Plan:
    return plan(RequestFacts(tokens), fleet, forced, targets=Targets(), min_remote_tokens=64, rng=rng)


def test_a_hit_of_all_of_a_prompt_is_worth_eight_sequences_sent_lately():
    for tokens in (512, 4096, 100_000):
        whole_s = MODEL.prompt_seconds(tokens, 0, 256)
        assert 8 * sequence_s(MODEL, whole_s) == pytest.approx(whole_s)
    assert sequence_s(MODEL, 0.048) > 0.048, "too short a prompt to matter more than a sequence"


@pytest.mark.parametrize(
    ("workers", "chosen"),
    [
        ([(0, 0), (0, 31)], {1}),  # (sent lately, blocks held)
        ([(0, 0), (0, 25), (0, 31)], {2}),
        ([(0, 0), (7, 31)], {1}),
        ([(0, 0), (14, 31)], {0}),
        ([(1, 0), (0.5, 0)], {1}),
        ([(3, 0), (1, 0), (1, 0)], {1, 2}),
        ([(0, 31), (0, 31), (0, 28)], {0, 1}),
    ],
)
def test_who_gets_a_prompt_of_512_tokens(workers, chosen):
    recent = {str(i): sent for i, (sent, _) in enumerate(workers)}
    found = {str(i): {"device": blocks} for i, (_, blocks) in enumerate(workers) if blocks}
    decode = FleetView(views(len(workers)), (), found, recent)
    made = [decide(512, decode, Forced.AUTO, random.Random(seed)) for seed in range(30)]
    assert {int(each.decode.worker_id) for each in made} == chosen
    one = replace(views(1)[0], incarnation="d")
    prefill = FleetView((one,), views(len(workers)), found, recent)
    made = [decide(512, prefill, Forced.DISAGGREGATED, random.Random(seed)) for seed in range(30)]
    assert {int(each.prefill.worker_id) for each in made if each.prefill} == chosen


def test_what_was_sent_lately_settles_where_all_get_alike():
    recent = [0.0, 0.0, 0.0, 0.0]
    for turn in range(1000):
        recent = [each * fade(4) for each in recent]
        recent[turn % 4] += 1
    assert all(14 < each < 18 for each in recent)


# A fleet of four under load.

SHARED = 32
"""Blocks of the prefix that all prompts share: 512 tokens."""

Prompt = tuple[int, ...]


def alike(rng: random.Random) -> Prompt:
    """The shared prefix and a question of its own."""
    return (*range(SHARED), rng.getrandbits(60))


def conversations(rng: random.Random) -> Prompt:
    """The shared prefix, one of twenty conversations with 512 tokens of its own, a question."""
    who = rng.randrange(20)
    return (*range(SHARED), *(1000 * (who + 1) + i for i in range(32)), rng.getrandbits(60))


class Workers:
    """Four workers, and routers that see their blocks `lag` requests late."""

    def __init__(self, lag: int, num_routers: int = 1) -> None:
        self.held: list[set[int]] = [set() for _ in range(4)]
        self.load = [0] * 4
        self.recent = [[0.0] * 4 for _ in range(num_routers)]
        self.index = PrefixIndex()
        self.told = dict.fromkeys("0123", 0)
        for name in self.told:
            self.index.apply(name, 0, 0, True, ())
        self.shares: Counter[int] = Counter()
        self.hits = 0
        self._news: deque[tuple[int, Prompt]] = deque()
        self._running: deque[int] = deque()
        self._lag = lag

    def view(self, router: int, prompt: Prompt) -> FleetView:
        workers = (replace(each, load=load) for each, load in zip(views(4), self.load, strict=True))
        return FleetView(
            tuple(workers),
            (),
            {name: self.index.leading(name, prompt) for name in "0123"},
            dict(zip("0123", self.recent[router], strict=True)),
        )

    def serve(self, router: int, chosen: int, prompt: Prompt, in_flight: int) -> None:
        """`in_flight` requests run at once; the oldest ends when one more begins."""
        self.shares[chosen] += 1
        found = next((i for i, block in enumerate(prompt) if block not in self.held[chosen]), len(prompt))
        self.hits += found * 16
        self.held[chosen].update(prompt)
        self.recent[router] = [each * fade(4) for each in self.recent[router]]
        self.recent[router][chosen] += 1
        self.load[chosen] += 1
        self._running.append(chosen)
        if len(self._running) > in_flight:
            self.load[self._running.popleft()] -= 1
        self._news.append((chosen, prompt))
        while len(self._news) > self._lag:
            self._tell(*self._news.popleft())

    def _tell(self, worker: int, prompt: Prompt) -> None:
        name = str(worker)
        first = self.told[name]
        self.told[name] += 1
        assert self.index.apply(name, first, first + 1, False, [Changes("device", prompt)])

    @property
    def skew(self) -> float:
        return max(self.shares.values()) / min(self.shares[i] for i in range(4))


def run(prompts: list[Prompt], in_flight: int, lag: int, num_routers: int, seed: int) -> Workers:
    rng, workers = random.Random(seed), Workers(lag, num_routers)
    for turn, prompt in enumerate(prompts):
        router = turn % num_routers
        made = decide(len(prompt) * 16, workers.view(router, prompt), Forced.LOCAL, rng)
        workers.serve(router, int(made.decode.worker_id), prompt, in_flight)
    return workers


def round_robin(prompts: list[Prompt]) -> Workers:
    workers = Workers(lag=0)
    for turn, prompt in enumerate(prompts):
        workers.serve(0, turn % 4, prompt, in_flight=0)
    return workers


@pytest.mark.parametrize("kind", [alike, conversations])
@pytest.mark.parametrize("num_routers", [1, 2])
@pytest.mark.parametrize(
    ("in_flight", "lag"), [(0, 0), (0, 3), (16, 8), (200, 20)], ids=["paced", "late", "busy", "burst"]
)
def test_four_workers_and_a_shared_prefix_of_512_tokens(kind, num_routers, in_flight, lag):
    """Round robin computes the shared prefix once on each worker. So must whoever gives each of them its
    share; what lies behind that prefix is where the hits are to be had."""
    for seed in range(3):
        rng = random.Random(seed)
        prompts = [kind(rng) for _ in range(200)]
        ours, robin = run(prompts, in_flight, lag, num_routers, seed), round_robin(prompts)
        assert ours.skew <= 2
        assert ours.hits >= robin.hits
        if kind is conversations:
            assert ours.hits > 1.05 * robin.hits


def test_a_burst_that_is_over_before_any_news_is_spread_evenly():
    """Nothing is known to be held anywhere: as good as round robin, no better."""
    prompts = [alike(random.Random(seed)) for seed in range(200)]
    ours = run(prompts, 200, 200, 2, 1)
    assert ours.skew <= 1.2
    assert ours.hits == round_robin(prompts).hits
