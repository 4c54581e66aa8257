"""Scheduling decisions as tables: requests in, who runs how many tokens out. No model takes part.

Blocks hold 4 tokens. A request that is admitted needs the blocks of its prompt and of one token more,
and leaves one block free for each running request that generates.
"""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from core.clock import FakeClock
from core.request import PrefillTarget, Request, SamplingParams
from engine.admission import MAX_MISFITS, MAX_PASSED_OVER
from engine.block_pool import BlockPool
from engine.budget import cap_rows, share_budget
from engine.messages import Event, LoadCancelled, LoadOrdered, LoadReport
from engine.scheduler import Scheduler
from engine.sequence import PrefillJob
from engine.step import Limits

SIZE = 4
TARGET = PrefillTarget("p0", "127.0.0.1:1", "life")


class Desk:
    """A scheduler whose steps are carried out at once: every sampled token is 0."""

    def __init__(self, num_blocks: int, max_num_seqs: int = 64, budget: int = 1000) -> None:
        self.pool = BlockPool(num_blocks)
        limits = Limits(
            block_size=SIZE,
            max_model_len=1000,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=budget,
            max_waiting=1000,
        )
        self.scheduler = Scheduler(self.pool, limits, b"namespace", FakeClock())
        self.events: list[Event] = []
        self.num_added = 0

    def add(
        self,
        name: str,
        length: int,
        max_tokens: int = 8,
        n: int = 1,
        prefill: PrefillTarget | None = None,
        **given: Any,
    ) -> None:
        """Queue a request whose prompt shares no block with any other; `given`: of its SamplingParams."""
        self.num_added += 1
        sampling = SamplingParams(max_tokens=max_tokens, seed=0, n=n, **given)
        prompt = tuple(self.num_added * 1000 + i for i in range(length))
        assert self.scheduler.add(Request(name, prompt, sampling, prefill=prefill)) is None

    def step(self) -> dict[str, int]:
        """Tokens that each sequence computes in this step, in the order of the plan."""
        plan = self.scheduler.schedule()
        self.events += plan.events
        for chunk in plan.chunks:
            self.scheduler.computed(chunk, 0.0)
        for seq in [chunk.seq for chunk in plan.chunks if chunk.sample]:
            for choice in self.scheduler.fork(seq):
                choice.append(0)
                if choice.num_output == choice.sampling.max_tokens:
                    self.scheduler.finish(choice)
        self.pool.check()
        return {chunk.seq.seq_id: chunk.count for chunk in plan.chunks}

    def waiting(self) -> list[str]:
        return [seq.request_id for seq in self.scheduler.books.waiting]


@pytest.mark.parametrize(
    ("num_blocks", "max_num_seqs", "arrivals", "admitted"),
    [
        pytest.param(20, 8, [("a", 7, 1), ("b", 3, 1)], ["a", "b"], id="all-fit-in-order-of-arrival"),
        pytest.param(8, 8, [("a", 7, 1), ("b", 28, 1), ("c", 7, 1)], ["a", "c"], id="misfit-is-passed-over"),
        pytest.param(5, 8, [("a", 7, 1), ("b", 7, 1)], ["a", "b"], id="one-block-is-left-to-grow"),
        pytest.param(4, 8, [("a", 7, 1), ("b", 7, 1)], ["a"], id="no-block-would-be-left-to-grow"),
        pytest.param(3, 8, [("a", 8, 1)], ["a"], id="alone-it-may-fill-the-pool"),
        pytest.param(50, 2, [("a", 3, 1), ("b", 3, 1), ("c", 3, 1)], ["a", "b"], id="max-num-seqs"),
        pytest.param(
            50, 4, [("a", 3, 3), ("b", 3, 2), ("c", 3, 1)], ["a"], id="n-counts-and-is-not-overtaken"
        ),
        pytest.param(50, 4, [("a", 3, 3), ("b", 3, 1)], ["a", "b"], id="n-fills-it-exactly"),
    ],
)
def test_who_is_admitted(num_blocks: int, max_num_seqs: int, arrivals, admitted: list[str]) -> None:
    desk = Desk(num_blocks, max_num_seqs)
    for name, length, n in arrivals:
        desk.add(name, length, max_tokens=4, n=n)
    assert list(desk.step()) == [f"{name}/0" for name in admitted]
    assert desk.waiting() == [name for name, *_ in arrivals if name not in admitted]


def test_a_misfit_is_overtaken_only_so_often() -> None:
    desk = Desk(num_blocks=8)
    desk.scheduler.add_prefill(PrefillJob("job", tuple(range(8))))
    desk.step()
    desk.add("misfit", 24, max_tokens=4)
    for i in range(MAX_PASSED_OVER):
        desk.add(f"short{i}", 1, max_tokens=1)
        assert f"short{i}/0" in desk.step()
    desk.add("late", 1, max_tokens=1)
    assert "late/0" not in desk.step()
    desk.scheduler.abort("job")
    assert list(desk.step()) == ["misfit/0", "late/0"]


def test_a_long_queue_costs_few_look_ups(monkeypatch) -> None:
    desk = Desk(num_blocks=12)
    lookups: list[int] = []
    match = desk.pool.match
    monkeypatch.setattr(desk.pool, "match", lambda *given: lookups.append(1) or match(*given))
    desk.add("running", 15, max_tokens=30)
    desk.step()
    for i in range(500):
        desk.add(f"waiting{i}", 30, max_tokens=1)
    lookups.clear()
    desk.step()
    assert len(lookups) == MAX_MISFITS
    while desk.pool.num_free > 1:
        desk.step()
    lookups.clear()
    desk.step()
    assert not lookups, "nothing is free beyond what the running one may take next"


def test_the_youngest_is_preempted_and_goes_first_again() -> None:
    desk = Desk(num_blocks=6)
    for name in ("a", "b"):
        desk.add(name, 7, max_tokens=14)
    assert desk.step() == {"a/0": 7, "b/0": 7}
    desk.add("c", 8, max_tokens=1)
    for _ in range(5):
        assert desk.step() == {"a/0": 1, "b/0": 1}
    assert desk.step() == {"a/0": 1}, "token 13 needs a fourth block: b gives up its three"
    assert desk.waiting() == ["b", "c"]
    while "b/0" not in (done := desk.step()):
        assert list(done) == ["a/0"]
    assert next(iter(done)) == "b/0", "it continues before those that came later"
    assert desk.scheduler.num_preempted == 1


def test_prefill_jobs_are_never_preempted() -> None:
    """Their blocks are leased while they are built; the only one that generates gives way itself."""
    desk = Desk(num_blocks=5, budget=5)
    desk.add("a", 3, max_tokens=8)
    desk.step()
    assert desk.scheduler.add_prefill(PrefillJob("job", tuple(range(12)))) is None
    seen = [desk.step() for _ in range(6)]
    assert seen[:4] == [{"a/0": 1, "job": 4}, {"a/0": 1, "job": 4}, {"a/0": 1, "job": 4}, {"a/0": 1}]
    assert seen[5] == {}
    assert (desk.waiting(), list(desk.scheduler.books.held)) == (["a"], ["job"])
    desk.scheduler.abort("job")
    assert desk.step() == {"a/0": 1}, "one token is left to compute: it runs in the step that admits it"


def test_decodes_come_first_and_prompts_share_the_rest() -> None:
    desk = Desk(num_blocks=64, budget=11)
    desk.add("a", 3)
    desk.step()
    desk.add("long", 40)
    desk.add("short", 4)
    assert desk.step() == {"a/0": 1, "long/0": 6, "short/0": 4}
    assert desk.step() == {"a/0": 1, "short/0": 1, "long/0": 9}


@pytest.mark.parametrize("unquiet", [False, True])
@pytest.mark.parametrize("moment", ["waiting", "ordered", "arriving", "finished", "decoding"])
def test_a_load_is_aborted_at_each_moment(moment: str, unquiet: bool) -> None:
    """Its blocks stay taken until the load is over, and come back once, whenever the abort comes."""
    desk = Desk(num_blocks=16)
    s = desk.scheduler
    desk.add("r", 18, prefill=TARGET)
    steps = {
        "waiting": lambda: None,
        "ordered": desk.step,
        "arriving": lambda: s.blocks_arrived("r/0", 2, 0),
        "finished": lambda: s.load_finished("r/0", LoadReport(2, unquiet=late)),
        "decoding": desk.step,
    }
    late: tuple[int, ...] = ()
    for name, act in steps.items():
        act()
        if name == "ordered":
            (order,) = [e for e in desk.events if isinstance(e, LoadOrdered)]
            assert (order.first_block, len(order.block_ids)) == (0, 4)
            late = order.block_ids[3:] if unquiet else ()
        if name == moment:
            break
    for _ in range(2):
        s.abort("r")
    desk.step()
    loading = moment in ("ordered", "arriving")
    assert sum(isinstance(e, LoadCancelled) for e in desk.events) == loading
    if loading:
        assert desk.pool.num_free == 16 - 5, "a read may still write"
        s.blocks_arrived("r/0", 3, 0)
        s.load_finished("r/0", LoadReport(3, unquiet=late))
    s.load_finished("r/0", LoadReport(4))
    assert desk.pool.num_quarantined == (0 if moment == "waiting" else len(late))
    s.pool.quiet(late)
    assert (desk.pool.num_free, s.books.open_ids(), s.reports) == (16, [], {})
    assert desk.step() == {}


@pytest.mark.parametrize(
    ("remaining", "budget", "shares"),
    [
        ([], 8, []),
        ([5], 0, [0]),
        ([5], 8, [5]),
        ([20], 8, [8]),
        ([20, 2, 3], 8, [4, 2, 2]),
        ([20, 9, 1], 8, [4, 3, 1]),
        ([20, 4, 4], 8, [4, 4, 0]),
        ([1, 20, 20], 8, [1, 7, 0]),
        ([20, 20], 7, [4, 3]),
    ],
)
def test_budget_shares(remaining: list[int], budget: int, shares: list[int]) -> None:
    assert share_budget(remaining, budget) == shares


@pytest.mark.parametrize(
    ("remaining", "every_row", "capped"),
    [
        ([], "", []),
        ([20], "-", [20]),
        ([20], "x", [8]),
        ([3, 20, 20], "xxx", [3, 5, 0]),
        ([20, 20, 20, 2], "-x-x", [20, 8, 20, 0]),
    ],
)
def test_prompts_that_want_every_row_share_the_rows(
    remaining: list[int], every_row: str, capped: list[int]
) -> None:
    assert cap_rows(remaining, [each == "x" for each in every_row], 8) == capped


def test_prompt_logprobs_take_so_many_rows_a_step() -> None:
    """1. Two clients ask for the log probabilities of long prompts, a third does not. 2. No step computes
    more than 256 of their rows; the third is done at once, all come to their token."""
    desk = Desk(num_blocks=500)
    for name in ("a", "b"):
        desk.add(name, 300, max_tokens=1, logprobs=0, prompt_logprobs=True)
    desk.add("c", 300, max_tokens=1)
    assert [desk.step() for _ in range(4)] == [
        {"a/0": 256, "c/0": 300},
        {"a/0": 44, "b/0": 212},
        {"b/0": 88},
        {},
    ]


@given(st.lists(st.integers(1, 5000), max_size=40), st.integers(-5, 4000))
def test_budget_is_spent_fully_and_the_oldest_is_sure_of_half(remaining: list[int], budget: int) -> None:
    shares = share_budget(remaining, budget)
    assert all(0 <= share <= want for share, want in zip(shares, remaining, strict=True))
    assert sum(shares) == min(sum(remaining), max(0, budget))
    if remaining and budget > 0:
        assert shares[0] >= min(remaining[0], budget / 2)
    starved = [want for share, want in zip(shares[1:], remaining[1:], strict=True) if share < want]
    served = [want for share, want in zip(shares[1:], remaining[1:], strict=True) if share == want]
    assert not starved or max(served, default=0) <= min(starved), "the shortest come first"
