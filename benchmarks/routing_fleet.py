"""What a router is told by workers that do not exist: for `benchmarks.routing`.

The models are those of a 135M model on a core or two, as its workers fit them.
"""

from __future__ import annotations

import random
import time

from core.kv import Fingerprint
from core.request import Role
from core.step_model import StepModel
from services.router.roster import Roster
from wire import codec
from wire.v1 import worker_pb2 as pb

BLOCK_SIZE = 32
PRINT = Fingerprint("m", "t", 30, 3, 64, BLOCK_SIZE, "fp32", "default/100000", 131_072)
PREFILL = StepModel(a=0.005, b=0.001, c=2e-7, num_steps=1000)
DECODE = StepModel(a=0.02, b=0.002, c=1e-6, num_steps=1000)
CHUNK_TOKENS = 256
MAX_NUM_SEQS = 64
LINK_NBYTES_PER_S = 2e9


def hello(name: str, role: Role, total_blocks: int) -> pb.Hello:
    return pb.Hello(
        worker_id=name,
        incarnation=name,
        role=role,
        fingerprint=codec.fingerprint_to_wire(PRINT),
        address=f"{name}:1",
        total_blocks=total_blocks,
        max_num_seqs=MAX_NUM_SEQS,
        max_num_batched_tokens=CHUNK_TOKENS,
    )


def state(running: int, waiting: int, queued_tokens: int, context_tokens: int) -> pb.State:
    return pb.State(
        phase="ready",
        running=running,
        waiting=waiting,
        queued_tokens=queued_tokens,
        context_tokens=context_tokens,
        prefill_model=codec.step_model_to_wire(PREFILL),
        decode_model=codec.step_model_to_wire(DECODE),
    )


class Crowd:
    """`num_workers` in two equal roles, as busy as chance has it. Each holds a prefix that all share, four
    conversations of 40 blocks, and other blocks up to `blocks`."""

    def __init__(self, num_workers: int, blocks: int, rng: random.Random) -> None:
        self.roster = Roster("t", silence_s=3600, rng=rng)
        self.shared = [rng.getrandbits(64) for _ in range(16)]
        self.conversations = [[rng.getrandbits(64) for _ in range(40)] for _ in range(2 * num_workers)]
        self._rng = rng
        self._names = [f"w{number}" for number in range(num_workers)]
        self._next = dict.fromkeys(self._names, 1)
        for number, name in enumerate(self._names):
            self.roster.add(name)
            role = Role.PREFILL if number % 2 else Role.DECODE
            self.roster.hello(name, hello(name, role, 100_000), time.monotonic())
            self._report(name)
            held = [*self.shared]
            for i in range(4):
                held += self.conversations[(number // 2 * 4 + i) % len(self.conversations)]
            held += [rng.getrandbits(64) for _ in range(blocks - len(held))]
            told = pb.TierChanges(tier="device", stored=held)
            self.roster.kv(name, pb.KvEvents(next=1, snapshot=True, tiers=[told]))

    def prompt(self) -> list[int]:
        """Blocks of a prompt: the shared ones, a part of a conversation, up to 20 that nobody has."""
        rng = self._rng
        known = self.shared + rng.choice(self.conversations)[: rng.randrange(40)]
        return known + [rng.getrandbits(64) for _ in range(rng.randrange(20))]

    def go_on(self, states: int) -> None:
        """So many workers report, each tenth with news of its blocks."""
        for turn in range(states):
            name = self._rng.choice(self._names)
            self._report(name)
            if turn % 10 == 0:
                first = self._next[name]
                self._next[name] += 1
                new = pb.TierChanges(tier="device", stored=[self._rng.getrandbits(64) for _ in range(4)])
                self.roster.kv(name, pb.KvEvents(first=first, next=first + 1, tiers=[new]))

    def _report(self, name: str) -> None:
        rng = self._rng
        said = state(rng.randrange(20), rng.randrange(3), rng.randrange(4000), rng.randrange(40_000))
        self.roster.state(name, pb.State.FromString(said.SerializeToString()), time.monotonic())
