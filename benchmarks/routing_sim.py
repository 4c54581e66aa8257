"""Workers that compute nothing but the time it would take, behind routers as they run in production.

    arrival -- router: Roster, plan() --> D: queue, steps --> token 1, the other tokens
       ^                                  `-- ask --> P: queue, steps -- pull --'
       '-- State and news of blocks, at most each 50 ms, 1 ms under way --'

A step takes all that decode, then prompts within the chunk: half for the oldest, half for the shortest. A
worker keeps the blocks it has built or pulled, the least recently used go first.
"""

from __future__ import annotations

import heapq
import itertools
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from benchmarks.routing_fleet import (
    BLOCK_SIZE,
    CHUNK_TOKENS,
    DECODE,
    LINK_NBYTES_PER_S,
    MAX_NUM_SEQS,
    PREFILL,
    PRINT,
    hello,
    state,
)
from core.blocks import num_shareable_blocks
from core.request import Role
from planning.price import token_nbytes
from services.router.roster import Roster
from wire.v1 import worker_pb2 as pb

MESSAGE_S = 0.001
REPORT_EVERY_S = 0.05


@dataclass(slots=True)
class Asked:
    """A request: `keys` of its prompt's full blocks, tokens in and out, and what became of it."""

    at: float
    keys: Sequence[int]
    tokens: int
    answer: int
    name: str = ""
    decode: str = ""
    prefill: str | None = None
    predicted_s: float = 0.0
    ttft_s: float = 0.0
    hit_tokens: int = 0

    @property
    def shareable(self) -> int:
        """Leading blocks that may come from elsewhere."""
        return min(len(self.keys), num_shareable_blocks(self.tokens, BLOCK_SIZE))


@dataclass(slots=True)
class Job:
    """A prompt at one worker, up to `end` tokens; `had`: blocks that were brought to it from elsewhere."""

    asked: Asked
    end: int
    then: Callable[[], None]
    had: int = 0
    done: int = 0
    cached: int = 0


@dataclass(slots=True)
class Stream:
    context: int
    left: int


class Clock:
    """Events in the order of their times."""

    def __init__(self) -> None:
        self.now = 0.0
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()

    def after(self, seconds: float, what: Callable[[], None]) -> None:
        heapq.heappush(self._events, (self.now + seconds, next(self._order), what))

    def run(self) -> None:
        while self._events:
            self.now, _, what = heapq.heappop(self._events)
            what()


@dataclass
class Worker:
    """`rosters`: of the routers that it reports to."""

    name: str
    role: Role
    clock: Clock
    rosters: Sequence[Roster]
    num_blocks: int
    waiting: list[Job] = field(default_factory=list)
    jobs: list[Job] = field(default_factory=list)
    streams: list[Stream] = field(default_factory=list)
    busy: bool = False
    _step_began_at: float = 0.0
    _taken: list[str] = field(default_factory=list)
    _blocks: OrderedDict[int, None] = field(default_factory=OrderedDict)
    _stored: dict[int, bool] = field(default_factory=dict)
    _number: int = 1
    _reported_at: float = -1.0
    _reporting: bool = False

    def __post_init__(self) -> None:
        for roster in self.rosters:
            roster.add(self.name)
            roster.hello(self.name, hello(self.name, self.role, self.num_blocks), 0.0)
            roster.kv(self.name, pb.KvEvents(next=1, snapshot=True))
            roster.state(self.name, state(0, 0, 0, 0), 0.0)

    def submit(self, job: Job) -> None:
        self.waiting.append(job)
        self._taken.append(job.asked.name)
        self._changed()
        self._step()

    def held(self, asked: Asked) -> int:
        """Leading blocks of it that this worker holds."""
        keys = asked.keys[: asked.shareable]
        return next((i for i, key in enumerate(keys) if key not in self._blocks), len(keys))

    def keep(self, keys: Sequence[int]) -> None:
        """These blocks are here, and used just now."""
        for key in reversed(keys):  # a block is of no use without those before it: they go last
            if key not in self._blocks:
                self._stored[key] = True
            self._blocks[key] = None
            self._blocks.move_to_end(key)
        while len(self._blocks) > self.num_blocks:
            self._stored[self._blocks.popitem(last=False)[0]] = False

    def _step(self) -> None:
        if self.busy:
            return
        while self.waiting and len(self.jobs) + len(self.streams) < MAX_NUM_SEQS:
            self._admit(self.waiting.pop(0))
        chunks = self._chunks()
        if not chunks and not self.streams:
            return
        tokens = sum(count for _, count in chunks)
        products = sum(count * (job.done + count / 2) for job, count in chunks)
        num_streams, context = len(self.streams), sum(each.context for each in self.streams)
        seconds = DECODE.seconds(num_streams, context)
        if tokens:
            seconds = PREFILL.seconds(tokens, products)
            if num_streams:
                seconds += DECODE.seconds(num_streams, context) - DECODE.a
        self.busy, self._step_began_at = True, self.clock.now
        self.clock.after(seconds, lambda: self._stepped(chunks))

    def _admit(self, job: Job) -> None:
        job.cached = min(max(self.held(job.asked), job.had) * BLOCK_SIZE, job.end)
        job.done = job.cached
        self.jobs.append(job)

    def _chunks(self) -> list[tuple[Job, int]]:
        """Tokens of each job in this step; 0 of one that has all of its tokens already."""
        if not self.jobs:
            return []
        budget, given = CHUNK_TOKENS, dict.fromkeys(range(len(self.jobs)), 0)
        left = [job.end - job.done for job in self.jobs]
        shortest = sorted(range(1, len(self.jobs)), key=left.__getitem__)
        for number, share in ((0, budget // 2), *((i, budget) for i in shortest), (0, budget)):
            count = min(left[number] - given[number], share, budget)
            given[number] += count
            budget -= count
        chosen = [(self.jobs[number], count) for number, count in given.items()]
        return [(job, count) for job, count in chosen if count or job.done >= job.end]

    def _stepped(self, chunks: list[tuple[Job, int]]) -> None:
        self.busy = False
        for stream in self.streams:
            stream.context += 1
            stream.left -= 1
        self.streams = [stream for stream in self.streams if stream.left > 0]
        for job, count in chunks:
            job.done += count
            if job.done >= job.end:
                self.jobs.remove(job)
                self.keep(job.asked.keys[: min(job.asked.shareable, job.end // BLOCK_SIZE)])
                job.then()
        self._changed()
        self._step()

    def _changed(self) -> None:
        if not self._reporting:
            self._reporting = True
            due_s = max(0.0, self._reported_at + REPORT_EVERY_S - self.clock.now)
            self.clock.after(due_s, self._report)

    def _report(self) -> None:
        self._reporting, self._reported_at = False, self.clock.now
        queued = sum(job.end - job.done for job in self.jobs)
        queued += sum(job.end - self.held(job.asked) * BLOCK_SIZE for job in self.waiting)
        said = state(
            len(self.jobs) + len(self.streams),
            len(self.waiting),
            max(0, queued),
            sum(stream.context for stream in self.streams),
        )
        said.taken[:], self._taken = self._taken, []
        said.step_s = self.clock.now - self._step_began_at if self.busy else 0.0
        changes = pb.TierChanges(
            tier="device",
            stored=[key for key, stored in self._stored.items() if stored],
            evicted=[key for key, stored in self._stored.items() if not stored],
        )
        self._stored.clear()
        first = self._number
        self._number += 1
        news = pb.KvEvents(first=first, next=first + 1, tiers=[changes])
        self.clock.after(MESSAGE_S, lambda: self._tell(said, news))

    def _tell(self, said: pb.State, news: pb.KvEvents) -> None:
        for roster in self.rosters:
            roster.state(self.name, said, self.clock.now)
            roster.kv(self.name, news)


def serve(clock: Clock, asked: Asked, decode: Worker, prefill: Worker | None) -> None:
    """A request at the worker that was chosen for it."""

    def answer() -> None:
        asked.ttft_s = clock.now - asked.at + MESSAGE_S
        if asked.answer > 1:
            decode.streams.append(Stream(asked.tokens, asked.answer - 1))

    if prefill is None:
        asked.hit_tokens = decode.held(asked) * BLOCK_SIZE
        decode.submit(Job(asked, asked.tokens, answer))
        return
    blocks = asked.shareable
    missing = blocks - decode.held(asked)
    asked.hit_tokens = prefill.held(asked) * BLOCK_SIZE
    block_pull_s = BLOCK_SIZE * token_nbytes(PRINT) / LINK_NBYTES_PER_S
    job = Job(asked, blocks * BLOCK_SIZE, lambda: None)
    began = clock.now + MESSAGE_S

    def built() -> None:
        last = min(missing, CHUNK_TOKENS // BLOCK_SIZE)
        exposed_s = max(last * block_pull_s, missing * block_pull_s - (clock.now - began))
        clock.after(MESSAGE_S + exposed_s, pulled)

    def pulled() -> None:
        decode.submit(Job(asked, asked.tokens, answer, had=blocks))

    job.then = built
    clock.after(MESSAGE_S, lambda: prefill.submit(job))
