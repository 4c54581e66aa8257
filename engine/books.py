"""The sequences of one worker by state, each kind in the order of arrival. Knows no blocks, decides nothing.

Add -> WAITING --admit--> RUNNING ------------------> FINISHED
          ^   \\--admit--> LOADING --LoadFinished--^      ^
          '--- preempt ---- RUNNING                      |
AddPrefill -> WAITING --admit--> RUNNING --> HELD -- Abort/release
"""

from __future__ import annotations

from collections.abc import Iterator

from engine.sequence import Sequence, State
from engine.wait_queue import WaitQueue, insert


class Books:
    """Whoever moves a sequence on takes it out of its old place first; FINISHED ones have none."""

    def __init__(self) -> None:
        self.waiting = WaitQueue()
        self.loading: dict[str, Sequence] = {}
        self.running: list[Sequence] = []
        self.held: dict[str, Sequence] = {}
        self._order = 0

    def next_order(self) -> int:
        """The place of one more arrival behind all others."""
        self._order += 1
        return self._order

    # ---- moves

    def wait(self, seq: Sequence, num_tokens: int) -> None:
        """`num_tokens`: see `WaitQueue.add`."""
        seq.state = State.WAITING
        self.waiting.add(seq, num_tokens)

    def load(self, seq: Sequence) -> None:
        seq.state = State.LOADING
        self.loading[seq.seq_id] = seq

    def run(self, seq: Sequence) -> None:
        seq.state = State.RUNNING
        insert(self.running, seq)

    def hold(self, seq: Sequence) -> None:
        seq.state = State.HELD
        self.held[seq.seq_id] = seq

    # ---- questions

    @property
    def active(self) -> Iterator[Sequence]:
        """Those that have blocks and go on here: the running ones, then the loading ones."""
        yield from self.running
        yield from self.loading.values()

    def of(self, request_id: str, index: int | None = None) -> list[Sequence]:
        """What waits, loads or runs under an id; `index`: only the choice that stands alone under it."""
        return [
            s
            for s in [*self.waiting, *self.loading.values(), *self.running]
            if s.request_id == request_id and (index is None or (s.index == index and s.width == 1))
        ]

    def is_live(self, request_id: str) -> bool:
        return bool(self.of(request_id)) or request_id in self.held

    def open_ids(self) -> list[str]:
        """Ids of all requests and jobs that still expect an answer or hold blocks for a peer."""
        everything = [*self.waiting, *self.loading.values(), *self.running, *self.held.values()]
        return list(dict.fromkeys(seq.request_id for seq in everything if not seq.aborted))

    def tokens_ahead(self, block_size: int) -> tuple[int, int]:
        """Tokens to compute of prompts and of what was preempted, but for those about to be loaded; tokens
        that the sequences which decode attend to."""
        queued, context = self.waiting.num_tokens, 0
        for seq in self.loading.values():
            queued += len(seq.tokens) - seq.load_until * block_size
        for seq in self.running:
            if seq.decoding:
                context += len(seq.tokens)
            else:
                queued += seq.num_to_compute
        return queued, context
