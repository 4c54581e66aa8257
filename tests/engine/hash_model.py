"""A model that is a hash: its next token depends on every token it can reach through the block table.

A wrong block, a stale slot, a lost copy-on-write or a doubled position gives another answer, so the
paging is checked by comparing tokens, without a real model.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

import torch

from core.clock import FakeClock
from core.request import Request, SamplingParams, TokenDelta
from engine.batch import Batch
from engine.block_pool import BlockPool
from engine.engine import Engine
from engine.messages import Add, Event, Failed
from engine.paging import BlockStore
from engine.scheduler import Scheduler
from engine.step import Limits

VOCAB = 97


def next_token(history: Sequence[int], sliding_window: int = 0) -> int:
    """What the hash model says after `history`, of which it sees the last `sliding_window` tokens (0: all)."""
    value, first = 17, max(0, len(history) - sliding_window) if sliding_window else 0
    for position, token in enumerate(history[first:], first):
        value = (value * 31 + token * 7 + position) % 1_000_003
    return value % VOCAB


def expected(
    prompt: Sequence[int], count: int, stop: frozenset[int] = frozenset(), sliding_window: int = 0
) -> list[int]:
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(next_token(tokens, sliding_window))
        if tokens[-1] in stop:
            break
    return tokens[len(prompt) :]


class HashRunner:
    """Keeps (token, position) per slot where a real model keeps K and V."""

    def __init__(self, num_blocks: int, block_size: int, sliding_window: int = 0) -> None:
        self.size, self.window = block_size, sliding_window
        self.slots: list[tuple[int, int] | None] = [None] * (num_blocks * block_size)
        self.tokens_computed = 0
        self.fail_at: int | None = None
        self.steps = 0

    def run(self, batch: Batch) -> torch.Tensor:
        self.steps += 1
        if self.fail_at == self.steps:
            raise RuntimeError("planted")
        self.tokens_computed += batch.num_tokens
        slots, tokens = batch.slots.tolist(), batch.token_ids.tolist()
        positions = batch.positions.tolist()
        for slot, token, position in zip(slots, tokens, positions, strict=True):
            self.slots[slot] = (token, position)
        logits = torch.zeros(len(batch.logits_rows), VOCAB)
        for out, row in enumerate(batch.logits_rows.tolist()):
            seq = max(i for i in range(batch.num_seqs) if batch.q_starts[i] <= row)
            table, history = batch.block_tables[seq].tolist(), []
            end = positions[row] + 1
            first = max(0, end - self.window) if self.window else 0
            for position in range(first, end):
                cell = self.slots[table[position // self.size] * self.size + position % self.size]
                assert cell is not None, "a slot that was never written is attended"
                token, written_for = cell
                assert written_for == position, f"slot of position {position} holds position {written_for}"
                history.append(token)
            logits[out, next_token([0] * first + history, self.window)] = 5.0
        return logits

    def copy_block(self, src: int, dst: int) -> None:
        for offset in range(self.size):
            self.slots[dst * self.size + offset] = self.slots[src * self.size + offset]


class Harness:
    """One engine on the hash model, stepped by hand."""

    def __init__(
        self,
        num_blocks: int = 64,
        block_size: int = 8,
        caching: bool = True,
        store: BlockStore | None = None,
        **limits: int,
    ) -> None:
        self.clock = FakeClock()
        self.pool = BlockPool(num_blocks, caching=caching)
        given = {
            "max_model_len": 8192,
            "max_num_seqs": 8,
            "max_num_batched_tokens": 32,
            "max_waiting": 10_000,
        }
        self.scheduler = Scheduler(
            self.pool, Limits(block_size=block_size, **(given | limits)), b"namespace", self.clock, store
        )
        self.runner = HashRunner(num_blocks, block_size, limits.get("sliding_window", 0))
        self.events: list[Event] = []
        self.prompt_lens: dict[str, int] = {}
        self.engine = Engine(self.scheduler, self.runner, self.events.extend, self.clock)

    def add(self, request_id: str, prompt: Sequence[int], max_tokens: int = 8, **more: object) -> None:
        names = ("prefill", "cache_salt", "block_hashes", "num_held", "itl_slo_s")
        fields = {k: more.pop(k) for k in names if k in more}
        params = SamplingParams(
            max_tokens=max_tokens, seed=more.pop("seed", 0), **({"temperature": 0.0} | more)
        )  # type: ignore[arg-type]
        num_held = fields.pop("num_held", 0)
        self.prompt_lens[request_id] = len(prompt)
        self.engine.handle(Add(Request(request_id, tuple(prompt), params, **fields), num_held))  # type: ignore[arg-type]

    def step(self) -> bool:
        busy = self.engine.step()
        self.pool.check()
        self.clock.advance(0.01)
        return busy

    def run(self, limit: int = 5000) -> None:
        for _ in range(limit):
            if not self.step() and not self.scheduler.books.waiting:
                return
        raise AssertionError("the engine did not come to rest")

    def tokens(self, request_id: str, index: int = 0) -> list[int]:
        return [
            t
            for e in self.events
            if isinstance(e, TokenDelta) and (e.request_id, e.index) == (request_id, index)
            for t in e.token_ids
        ]

    def finish(self, request_id: str) -> list[str]:
        return [
            str(e.finish_reason)
            for e in self.events
            if isinstance(e, TokenDelta) and e.request_id == request_id and e.finish_reason
        ]

    def gathered(self, request_id: str):
        return next(
            e.gathered
            for e in self.events
            if isinstance(e, TokenDelta) and e.request_id == request_id and e.gathered
        )

    def failure(self, request_id: str) -> Failed | None:
        return next((e for e in self.events if isinstance(e, Failed) and e.request_id == request_id), None)

    def assert_idle(self) -> None:
        """Free + cached-unreferenced = total; nothing runs, waits, loads or is held; and every prompt's
        tokens were accounted for by source."""
        self.pool.check()
        for event in self.events:
            if isinstance(event, TokenDelta) and event.gathered:
                g = event.gathered
                counts = [g.cached_tokens, g.remote_tokens, g.computed_tokens, *dict(g.tier_tokens).values()]
                assert min(counts) >= 0, g
                assert sum(counts) == self.prompt_lens[event.request_id], g
        s, b = self.scheduler, self.scheduler.books
        assert (len(b.running), len(b.waiting), len(b.loading), len(b.held), len(s.reports)) == (
            0,
            0,
            0,
            0,
            0,
        )
        assert self.pool.num_free == self.pool.num_blocks


def random_prompt(length: int, seed: int = 0) -> list[int]:
    return [random.Random(seed).randrange(VOCAB) for _ in range(length)]
