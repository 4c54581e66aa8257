"""A request as the workers see it: token ids in, token deltas out."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple


class FinishReason(StrEnum):
    STOP = "stop"
    LENGTH = "length"


class PlanKind(StrEnum):
    LOCAL = "local"
    DISAGGREGATED = "disaggregated"


class Role(StrEnum):
    PREFILL = "prefill"
    DECODE = "decode"


@dataclass(frozen=True, slots=True)
class Grammar:
    """What an answer has to match: `text` is a Lark grammar as llguidance reads it.

    `param` is the path of the client's parameter that it was made from; errors name it.
    """

    text: str
    param: str

    @property
    def field(self) -> str:
        """The body's own field: `structured_outputs` of `structured_outputs.regex`."""
        return self.param.partition(".")[0]


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How to choose tokens. Every value is final: the router has resolved defaults and the seed.

    `stop_token_ids` is the whole set that ends a choice (end-of-sequence ids unless the client
    asked to ignore them, plus its own). Stop *strings* are the router's business, it owns text.
    `seed` is always set, so that (seed + choice index, position) decides each draw and a resumed
    request draws the same again. `logprobs`: None = none, k = the chosen token and the k best.
    `allowed_token_ids`: nothing else may be drawn; empty = everything may. `bad_words` are token ids
    in a row that the output must not hold.
    """

    max_tokens: int
    seed: int
    min_tokens: int = 0
    n: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    stop_token_ids: frozenset[int] = frozenset()
    logit_bias: tuple[tuple[int, float], ...] = ()
    allowed_token_ids: tuple[int, ...] = ()
    bad_words: tuple[tuple[int, ...], ...] = ()
    grammar: Grammar | None = None
    logprobs: int | None = None
    prompt_logprobs: bool = False

    @property
    def greedy(self) -> bool:
        """The best token always: also below 1e-5, where logits / temperature would leave fp32's range."""
        return self.temperature < 1e-5

    @property
    def has_penalties(self) -> bool:
        return self.presence_penalty != 0.0 or self.frequency_penalty != 0.0 or self.repetition_penalty != 1.0


@dataclass(frozen=True, slots=True)
class PrefillTarget:
    """The prefill worker that a plan names: where it listens and which life of it is meant.

    `min_tokens`: fewer missing tokens than this are not worth asking it for; the decode worker alone
    knows what its own pool holds. `cached_blocks`: blocks' worth of computing that it is spared, as far as
    the router knows. `token_s`: seconds in which it computes a prompt token, 0 = not known. `queue_s`:
    seconds of work that it had before this, as the router saw it.
    """

    worker_id: str
    address: str
    incarnation: str
    min_tokens: int = 1
    cached_blocks: int = 0
    token_s: float = 0.0
    queue_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Request:
    """One generation on a decode worker.

    `block_hashes`: hashes of the prompt's full blocks (`core.blocks`), made once by the router.
    `epoch` counts the tries of the same request: a lease of an older try is void. `resumed`: what each
    choice that goes on has generated on a worker that was lost, (index, token ids); empty = from the
    beginning. `max_tokens` and `min_tokens` count those too. `itl_slo_s`: the longest step that its decoding
    should see, 0 = no target.
    """

    request_id: str
    prompt_token_ids: tuple[int, ...]
    sampling: SamplingParams
    block_hashes: tuple[bytes, ...] = ()
    cache_salt: str = ""
    prefill: PrefillTarget | None = None
    epoch: int = 0
    resumed: tuple[tuple[int, tuple[int, ...]], ...] = ()
    itl_slo_s: float = 0.0

    @property
    def open_choices(self) -> list[int]:
        """The choices to generate."""
        return [index for index, _ in self.resumed] or list(range(self.sampling.n))

    def tokens_of(self, index: int) -> tuple[int, ...]:
        """What choice `index` begins from: the prompt, and what it has generated elsewhere."""
        return self.prompt_token_ids + dict(self.resumed).get(index, ())

    @property
    def common_tokens(self) -> tuple[int, ...]:
        """What all of its choices begin from."""
        return self.tokens_of(self.resumed[0][0]) if len(self.resumed) == 1 else self.prompt_token_ids


class TokenLogprob(NamedTuple):
    """Log probability of one token under the raw distribution, and of the best ones there."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class Gathered:
    """Where a prompt's KV came from and what that took; reported once, with the first token.

    Token counts add up to the prompt's length. `transfer_exposed_s` is the part of the pull after
    the prefill worker's last commit, i.e. what computing did not hide. `remote_cached_tokens` is
    the part of `remote_tokens` that the prefill worker did not have to compute. `tier_tokens`: what
    each tier of this worker's own gave. `source_plan`: which sources were chosen for what the pool
    lacked, and the seconds each would have taken, as measured before. `queue_s`: from when the decode worker
    got the request to its first step there; `remote_queue_s`: the same of the prefill worker, a part of
    `prefill_s`, which goes on from there to the first token.
    """

    cached_tokens: int = 0
    tier_tokens: tuple[tuple[str, int], ...] = ()
    remote_tokens: int = 0
    remote_cached_tokens: int = 0
    computed_tokens: int = 0
    queue_s: float = 0.0
    transfer_nbytes: int = 0
    transfer_s: float = 0.0
    transfer_exposed_s: float = 0.0
    last_block_to_token_s: float = 0.0
    remote_queue_s: float = 0.0
    prefill_s: float = 0.0
    source_error: str = ""
    source_plan: str = ""

    @property
    def reused_tokens(self) -> int:
        """Tokens that nobody had to compute for this request."""
        return self.cached_tokens + sum(tokens for _, tokens in self.tier_tokens) + self.remote_cached_tokens


class TokenDelta(NamedTuple):
    """New tokens of one choice after one step. The last one carries `finish_reason`.

    A tuple, as it is made for every token: a frozen dataclass takes four times as long.
    """

    request_id: str
    index: int
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprob, ...] = ()
    finish_reason: FinishReason | None = None
    gathered: Gathered | None = None
    prompt_logprobs: tuple[TokenLogprob | None, ...] = ()
