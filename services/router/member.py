"""One discovered address: what was heard from there, and the planner's view of it."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from math import inf

from core.kv import Fingerprint
from core.request import Role
from core.step_model import GUESSED_DECODE, GUESSED_PREFILL, StepModel
from planning.price import FOLLOWING_TOKENS
from planning.worker_view import GUESSED_CHUNK_TOKENS, GUESSED_WAY_S, Sent, WorkerView
from wire import codec
from wire.v1 import worker_pb2 as pb

WAY_GAIN = 0.05
"""By such a share the way to a worker is corrected with each answer, up or down: half of the answers are
slower than that, and one that came very late counts as one."""


@dataclass(slots=True)
class Member:
    """`unseen`: work sent to it that none of its States counts yet; `done`: that its last State still counts
    and is over. `mismatch`: why it does not fit the fleet. `vote`: the fingerprint that it counts for.
    `way_s`: see WorkerView. `has_session`: whether a decode worker can be sent anything."""

    address: str
    hello: pb.Hello | None = None
    fingerprint: Fingerprint | None = None
    state: pb.State | None = None
    connected: bool = False
    has_session: bool = True
    heard_at: float = 0.0
    lost_reason: str = ""
    mismatch: str = ""
    vote: Fingerprint | None = None
    unseen: Sent = field(default_factory=Sent)
    done: Sent = field(default_factory=Sent)
    way_s: float = GUESSED_WAY_S
    _sent: dict[str, Sent] = field(default_factory=dict)
    _view: WorkerView | None = None

    @property
    def worker_id(self) -> str:
        return self.hello.worker_id if self.hello else self.address

    @property
    def role(self) -> str:
        return self.hello.role if self.hello else ""

    @property
    def chunk_tokens(self) -> int:
        """Of prompts, in a step at most."""
        return (self.hello.max_num_batched_tokens if self.hello else 0) or GUESSED_CHUNK_TOKENS

    @property
    def load(self) -> int:
        """Sequences it has or is about to have."""
        return self.unseen.sequences + max(0, self._told() - self.done.sequences)

    @property
    def busy_s(self) -> float:
        """Seconds, roughly, that it adds to whatever comes: to tell the busy ones of many. A worker of either
        role is busy with its queue, and slow where many decode."""
        s = self.state or pb.State()
        prefill, decode = s.prefill_model, s.decode_model
        queued, load = max(0, s.queued_tokens - self.done.tokens) + self.unseen.tokens, self.load
        token_s = prefill.b or GUESSED_PREFILL.b
        sequence_s = decode.b or GUESSED_DECODE.b
        return token_s * queued + FOLLOWING_TOKENS * (sequence_s * load + decode.c * s.context_tokens)

    def _told(self) -> int:
        """Sequences of its last State."""
        s = self.state
        return s.running + s.waiting + s.loading + s.held if s else 0

    def heard(self, state: pb.State, now: float) -> None:
        """Its State, which names what it counts for the first time."""
        self.state, self.heard_at = state, now
        for request_id in state.taken:
            if request_id in self._sent:
                self.unseen = self.unseen.less(self._sent.pop(request_id))
        self.done, self._view = Sent(), None

    def sent(self, request_id: str, work: Sent) -> None:
        """It was sent this."""
        self._sent[request_id] = work
        self.unseen, self._view = self.unseen + work, None

    def ended(self, request_id: str, work: Sent) -> None:
        """So much of what it was sent is over, sooner than its State says so. What a prefill worker has built
        is out of its States before a decode worker can answer; and in those of a decode worker only the last
        step's tokens are still counted."""
        unseen = self._sent.get(request_id)
        if unseen is None and self.role == Role.DECODE:
            self.done += replace(work, tokens=min(work.tokens, self.chunk_tokens))
        elif unseen is not None:
            self.unseen = self.unseen.less(work)
            self._sent[request_id] = left = unseen.less(work)
            if not left.sequences:
                del self._sent[request_id]
        self._view = None

    def answered(self, way_s: float) -> None:
        """A first token took so long beside what the worker counts."""
        self.way_s *= 1 + WAY_GAIN if way_s > self.way_s else 1 / (1 + WAY_GAIN)
        self._view = None

    def greeted(self, hello: pb.Hello, now: float) -> None:
        """Its Hello: the first one of a life, or another one."""
        if not self.connected:
            self.state = None
        self.hello, self.fingerprint = hello, codec.fingerprint_from_wire(hello.fingerprint)
        self.connected, self.heard_at, self._view = True, now, None

    def left(self) -> None:
        """Its life is over, or another one begins: nothing of what it was sent is there. Idempotent."""
        self._sent.clear()
        self.connected, self.unseen, self.done, self._view = False, Sent(), Sent(), None
        self.way_s = GUESSED_WAY_S

    def view(self) -> WorkerView:
        """It has said Hello."""
        if self._view is None:
            self._view = self._seen()
        return self._view

    def _seen(self) -> WorkerView:
        hello, state, unseen, done = self.hello, self.state or pb.State(), self.unseen, self.done
        assert hello is not None
        assert self.fingerprint is not None
        return WorkerView(
            worker_id=hello.worker_id,
            address=hello.address or self.address,
            incarnation=hello.incarnation,
            fingerprint=self.fingerprint,
            total_blocks=hello.total_blocks,
            load=self.load,
            running=max(0, state.running - done.sequences),
            waiting=state.waiting + unseen.sequences,
            queued_tokens=max(0, state.queued_tokens - done.tokens) + unseen.tokens,
            context_tokens=max(0, state.context_tokens - done.context_tokens) + unseen.context_tokens,
            max_num_seqs=hello.max_num_seqs,
            chunk_tokens=self.chunk_tokens,
            prefill_model=_model(state.prefill_model, GUESSED_PREFILL),
            decode_model=_model(state.decode_model, GUESSED_DECODE),
            tier_token_s={tier.tier: tier.token_s for tier in state.tiers if tier.breaker != "open"},
            link_nbytes_per_s={link.peer: link.nbytes_per_s for link in state.links},
            way_s=self.way_s,
            step_began_at=self.heard_at - state.step_s if self._told() else inf,
        )


def _model(message: pb.StepModel, guess: StepModel) -> StepModel:
    model = codec.step_model_from_wire(message)
    return model if model.a + model.b > 0 else guess
