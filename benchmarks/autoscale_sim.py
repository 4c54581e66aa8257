"""Two pools whose sizes a scaler changes while a trace is replayed: for `benchmarks.autoscale`.

    arrival --> P with the least to do: queue, compute --> D with most room, else wait --> token 1, the others

Workers take START_S to begin and, when they leave, end what they have. A prompt stays at the worker that it
was given to; an answer's KV is reserved whole, so nothing is preempted.

The models are arithmetic, not measurements: 8e9 parameters in bf16 (32 layers of 8 KV heads of 128, 131,072
bytes of KV per token) on a card with 24 GB, 300 GB/s and 60 TFLOP/s in practice. Prefill: 2 x 8e9 / 60e12 s
per token, and 4 x 32 x 4,096 operations per pair of tokens at half that rate. Decode: 16 GB / 300 GB/s per
step, 131,072 bytes / 300 GB/s per token of context.
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count
from operator import attrgetter

from core.step_model import StepModel
from planning.scaling import PERIOD_S, PRESSURE_S, DecodeLoad, PrefillLoad, Worker, leaving

PREFILL = StepModel(a=0.01, b=2.7e-4, c=2e-8)
DECODE = StepModel(a=0.055, b=5e-4, c=4.4e-7)
CHUNK_TOKENS = 2048
SEATS = 64
POOL_TOKENS = 40_000
"""5 GB of KV."""

HANDOFF_S = 0.01
START_S = 90.0
TTFT_S, ITL_S = 4.0, 0.1
"""The targets."""

TICK_S = 0.1


@dataclass(slots=True)
class Asked:
    at: float
    tokens: int
    answer: int
    ttft_s: float = math.inf
    itl_s: float = math.inf

    @property
    def kept(self) -> bool:
        return self.ttft_s <= TTFT_S and self.itl_s <= ITL_S


@dataclass(slots=True)
class Node:
    """A worker of either pool. `free_at`: when its prompts are computed. `made`: tokens that a sequence which
    was here from the start would have got; `ends`: at which of them each one is over."""

    name: str
    ready_at: float
    leaves: bool = False
    free_at: float = 0.0
    made: float = 0.0
    held_tokens: int = 0
    context: float = 0.0
    ends: list[tuple[float, int, float, Asked]] = field(default_factory=list)

    def is_busy(self, now: float) -> bool:
        return self.free_at > now or bool(self.ends)


@dataclass(frozen=True, slots=True)
class Seen:
    """What a scaler is told. `busy`: shares of time in which a worker had anything to do, over 60 s."""

    prefill: PrefillLoad
    decode: DecodeLoad
    prefill_ready: int
    decode_ready: int
    prefill_busy: float
    decode_busy: float


Sizes = tuple[int, int]
Scaler = Callable[[Seen, Sizes, float], Sizes]


held_tokens = attrgetter("held_tokens")


class Nodes:
    """One pool: grows and shrinks, and counts what it cost."""

    def __init__(self, role: str, size: int) -> None:
        self._names = (f"{role}-{number}" for number in count())
        self.nodes = [Node(next(self._names), 0.0) for _ in range(size)]
        self.directions: list[tuple[float, bool]] = []
        self.busy_s = self.ready_s = self.node_s = 0.0
        self._minute: deque[tuple[float, float]] = deque(maxlen=round(60 / PERIOD_S))

    @property
    def size(self) -> int:
        return sum(not node.leaves for node in self.nodes)

    def ready(self, now: float) -> list[Node]:
        return [node for node in self.nodes if node.ready_at <= now and not node.leaves]

    def resize(self, size: int, now: float, load: Callable[[Node], float]) -> None:
        if size == self.size:
            return
        self.directions.append((now, size > self.size))
        stay = [node for node in self.nodes if not node.leaves]
        self.nodes += [Node(next(self._names), now + START_S) for _ in range(size - len(stay))]
        views = [Worker(node.name, node.ready_at <= now, load(node)) for node in stay]
        gone = set(leaving(views, len(stay) - size) if size < len(stay) else ())
        for node in self.nodes:
            node.leaves |= node.name in gone

    def tick(self, now: float) -> None:
        self.nodes = [node for node in self.nodes if not node.leaves or node.is_busy(now)]
        ready = self.ready(now)
        self.node_s += TICK_S * len(self.nodes)
        self.ready_s += TICK_S * len(ready)
        self.busy_s += TICK_S * sum(node.is_busy(now) for node in ready)

    def busy(self) -> float:
        """To be asked each PERIOD_S."""
        self._minute.append((self.busy_s, self.ready_s))
        self.busy_s = self.ready_s = 0.0
        return sum(busy for busy, _ in self._minute) / max(1e-9, sum(ready for _, ready in self._minute))

    def reversals(self) -> list[float]:
        """When it turned from growing to shrinking or back."""
        steps = zip(self.directions, self.directions[1:], strict=False)
        return [at for (_, before), (at, after) in steps if before != after]


class Replay:
    """One trace under one scaler."""

    def __init__(self, trace: Sequence[Asked], sizes: Sizes, scaler: Scaler) -> None:
        self._trace, self._scaler = trace, scaler
        self.prefill, self.decode = Nodes("prefill", sizes[0]), Nodes("decode", sizes[1])
        self._waiting: deque[Asked] = deque()
        self._computing: list[tuple[float, int, Asked]] = []
        self._ttft: deque[tuple[float, float]] = deque()
        self._itl: deque[tuple[float, float]] = deque()
        self._order = count()

    def run(self) -> None:
        """Until the last answer's end; what is counted as cost ends with the last arrival."""
        arrivals, end, now, scaled_at = deque(self._trace), self._trace[-1].at, 0.0, 0.0
        while arrivals or self._computing or self._waiting or any(node.ends for node in self.decode.nodes):
            while arrivals and arrivals[0].at <= now:
                self._arrive(arrivals.popleft())
            while self._computing and self._computing[0][0] <= now:
                self._waiting.append(heapq.heappop(self._computing)[2])
            self._admit(now)
            for node in self.decode.nodes:
                self._step(node, now)
            if now <= end:
                self.prefill.tick(now)
                self.decode.tick(now)
                if now - scaled_at >= PERIOD_S:
                    scaled_at = now
                    self._scale(now)
            now = round(now + TICK_S, 6)

    def _arrive(self, asked: Asked) -> None:
        node = min(self.prefill.ready(asked.at), key=attrgetter("free_at"))
        begin = max(asked.at, node.free_at)
        node.free_at = begin + PREFILL.prompt_seconds(asked.tokens, 0, CHUNK_TOKENS)
        heapq.heappush(self._computing, (node.free_at + HANDOFF_S, next(self._order), asked))

    def _admit(self, now: float) -> None:
        """In the order in which the prompts were computed."""
        ready = self.decode.ready(now)
        while self._waiting:
            asked = self._waiting[0]
            need = asked.tokens + asked.answer
            node = min((each for each in ready if len(each.ends) < SEATS), key=held_tokens, default=None)
            if node is None or node.held_tokens + need > POOL_TOKENS:
                return
            self._waiting.popleft()
            node.held_tokens += need
            node.context += asked.tokens
            first_at = now + DECODE.seconds(len(node.ends) + 1, node.context)
            asked.ttft_s = first_at - asked.at
            self._ttft.append((first_at, asked.ttft_s / TTFT_S))
            heapq.heappush(node.ends, (node.made + asked.answer, next(self._order), now, asked))

    def _step(self, node: Node, now: float) -> None:
        if not node.ends:
            return
        made = TICK_S / DECODE.seconds(len(node.ends), node.context)
        node.made += made
        node.context += made * len(node.ends)
        while node.ends and node.ends[0][0] <= node.made:
            _, _, begun, asked = heapq.heappop(node.ends)
            node.held_tokens -= asked.tokens + asked.answer
            node.context = max(0.0, node.context - asked.tokens - asked.answer) if node.ends else 0.0
            asked.itl_s = (now + TICK_S - begun) / asked.answer
            self._itl.append((now, asked.itl_s / ITL_S))

    def _scale(self, now: float) -> None:
        prefill, decode = self.prefill.ready(now), self.decode.ready(now)
        seen = Seen(
            PrefillLoad(sum(max(0.0, node.free_at - now) for node in prefill), _p90(self._ttft, now)),
            DecodeLoad(
                sum(node.held_tokens for node in decode) / POOL_TOKENS,
                sum(len(node.ends) for node in decode) + len(self._waiting),
                SEATS,
                _p90(self._itl, now),
            ),
            len(prefill),
            len(decode),
            self.prefill.busy(),
            self.decode.busy(),
        )
        sizes = self._scaler(seen, (self.prefill.size, self.decode.size), now)
        self.prefill.resize(sizes[0], now, lambda node: node.free_at - now)
        self.decode.resize(sizes[1], now, lambda node: len(node.ends))


def _p90(ratios: deque[tuple[float, float]], now: float) -> float:
    while ratios and ratios[0][0] < now - PRESSURE_S:
        ratios.popleft()
    ranked = sorted(ratio for _, ratio in ratios)
    return ranked[math.ceil(0.9 * len(ranked)) - 1] if ranked else 0.0


def minutes(trace: Sequence[Asked]) -> Iterator[tuple[float, float]]:
    """Workers of each role that a minute's requests fill: with prompts, with KV at steps half as large as
    can be."""
    by_minute: dict[int, list[Asked]] = {}
    for asked in trace:
        by_minute.setdefault(int(asked.at // 60), []).append(asked)
    step_s = DECODE.seconds(SEATS / 2, POOL_TOKENS / 2)
    for number in range(int(trace[-1].at // 60) + 1):
        here = by_minute.get(number, [])
        prefill_s = sum(PREFILL.prompt_seconds(asked.tokens, 0, CHUNK_TOKENS) for asked in here)
        token_s = sum((asked.tokens + asked.answer) * asked.answer * step_s for asked in here)
        yield prefill_s / 60, token_s / 60 / POOL_TOKENS
