"""What a prompt would take on a decode worker alone, and on a pair: from measured models to seconds.

    local   way, D: slot, step that runs, queue | load | compute what nobody holds, beside D's decoding
    pair    way, D: slot, step that runs | P: step that runs, queue, load, compute
            | transfer that is not hidden | D: half a step, the last tokens

    cost = first token + HARM * streams held up + FOLLOWING_TOKENS * seconds of a later token + balance

What concerns one worker only is priced once for it, not for each pair it is in.
"""

from __future__ import annotations

from functools import lru_cache
from math import inf
from typing import NamedTuple

from core.kv import Fingerprint, KVLayout, parse_layers
from core.request import PlanKind
from planning.balance import SEQUENCE_SHARE, sequence_s
from planning.estimate import Estimate, Option, Targets
from planning.prefix_index import TIERS
from planning.worker_view import Found, WorkerView

LINK_GUESS_NBYTES_PER_S = 1e9
"""Between two workers that have not met: what one host's memory, or a 10 Gbit/s network, carries."""

CALL_S = 0.005
"""Asking a prefill worker, beside its computing and the bytes."""

HARM = 0.5
"""A second by which a stream is held up, in seconds of a prompt's wait."""

STREAMS_TO_COME = 1
"""Streams that will begin on a decode worker while it computes a prompt: it is never only idle time."""

FOLLOWING_TOKENS = 16
"""Tokens of the answer whose time counts as much as the first one's: of equal workers, the less busy one."""

GUESSED_ANSWER_TOKENS = 128
"""How long an answer is, for how soon one of those that run makes room."""


class Ask(NamedTuple):
    """A prompt's tokens, those of them that a prefill worker can build, what its client wants, and the time
    in the seconds of `FleetView.now`."""

    tokens: int
    shareable: int
    targets: Targets
    now: float = 0.0


class DecodePrice(NamedTuple):
    """What concerns a decode worker only.

    `cached`, `load_s`: tokens that its tiers bring, and how long they take. `begin_s`: until a step of it can
    take the request, with the way there and back; `meet_s`: until a later step can. To compute what is not
    cached: `queue_s` behind the prompts before it, `compute_s` itself, `beside_s` the decoding in the same
    steps; `rest_s`, `rest_beside_s`: only the tokens behind the last full block. `streams`: that a second of
    computing here holds up. `ahead`: sequences that it was sent lately more than the least. `whole_s`:
    computing all of the prompt.
    """

    worker: WorkerView
    cached: int
    load_s: float
    begin_s: float
    meet_s: float
    queue_s: float
    compute_s: float
    beside_s: float
    rest_s: float
    rest_beside_s: float
    itl_s: float
    streams: int
    ahead: float
    whole_s: float
    token_nbytes: int

    @property
    def pair_cost_s(self) -> float:
        """Its part of a pair's cost, but for what the link decides."""
        rest_s = self.rest_s * (1 + HARM * self.streams)
        return self.begin_s + self.meet_s + rest_s + FOLLOWING_TOKENS * self.itl_s


class PrefillPrice(NamedTuple):
    """What concerns a prefill worker only. `last_tokens`: of its last step, whose pull nothing hides."""

    worker: WorkerView
    cached: int
    queue_s: float
    load_s: float
    compute_s: float
    last_tokens: int
    balance_s: float

    @property
    def seconds(self) -> float:
        """Until the last block is built."""
        return self.queue_s + self.load_s + self.compute_s

    @property
    def pair_cost_s(self) -> float:
        """Its part of a pair's cost."""
        return self.seconds + self.balance_s


class Priced(NamedTuple):
    """A plan and what it takes, see `planning.estimate.Estimate`. `missed`: the larger ratio of an estimate
    to its target; 0 where there is none."""

    decode: DecodePrice
    prefill: PrefillPrice | None
    wait_s: float
    prefill_s: float
    transfer_s: float
    load_s: float
    ttft_s: float
    harm_s: float
    cost_s: float
    missed: float

    @property
    def meets(self) -> bool:
        """The targets."""
        return self.missed <= 1.0

    @property
    def rank(self) -> tuple[float, float]:
        """Smaller is better: by how much it misses the targets, then what it costs."""
        return (0.0 if self.missed <= 1.0 else self.missed), self.cost_s

    def option(self) -> Option:
        prefill = self.prefill
        return Option(
            PlanKind.LOCAL if prefill is None else PlanKind.DISAGGREGATED,
            self.decode.worker.worker_id,
            None if prefill is None else prefill.worker.worker_id,
            (prefill or self.decode).cached,
            Estimate(
                wait_s=self.wait_s,
                prefill_s=self.prefill_s,
                transfer_s=self.transfer_s,
                load_s=self.load_s,
                ttft_s=self.ttft_s,
                itl_s=self.decode.itl_s,
                harm_s=self.harm_s,
                cost_s=self.cost_s,
                meets=self.meets,
            ),
        )


def price_decode(worker: WorkerView, ask: Ask, found: Found, ahead: float) -> DecodePrice:
    """`ahead`: by how many sequences it was sent more lately than the least of those it is compared with."""
    model, chunk = worker.prefill_model, worker.chunk_tokens
    whole_s = model.prompt_seconds(ask.tokens, 0, chunk)
    cached, load_s = spared(worker, found, whole_s / ask.tokens, ask.shareable)
    decode, step_s, beside_s = worker.decode_model, 0.0, 0.0
    if worker.running:
        step_s = decode.seconds(worker.running, worker.context_tokens)
        beside_s = step_s - decode.a  # what a step costs at all counts once, with the prompts
    new = ask.tokens - cached
    present_s, queued_s = queue_s(worker, ask, new, beside_s)
    return DecodePrice(
        worker=worker,
        cached=cached,
        load_s=load_s,
        begin_s=worker.way_s + slot_s(worker, step_s) + present_s,
        meet_s=step_s / 2,
        queue_s=queued_s,
        compute_s=model.prompt_seconds(new, cached, chunk) if cached else whole_s,
        beside_s=-(-new // chunk) * beside_s,
        rest_s=model.prompt_seconds(ask.tokens - ask.shareable, ask.shareable, chunk),
        rest_beside_s=beside_s,
        itl_s=decode.seconds(worker.load + 1, worker.context_tokens + ask.tokens),
        streams=worker.load + STREAMS_TO_COME,
        ahead=ahead,
        whole_s=whole_s,
        token_nbytes=token_nbytes(worker.fingerprint),
    )


def price_prefill(worker: WorkerView, ask: Ask, found: Found, ahead: float) -> PrefillPrice:
    """`ahead`: by how many sequences it was sent more lately than the least of those it is compared with."""
    model, chunk = worker.prefill_model, worker.chunk_tokens
    whole_s = model.prompt_seconds(ask.tokens, 0, chunk)
    cached, load_s = spared(worker, found, whole_s / ask.tokens, ask.shareable)
    new = ask.shareable - cached
    return PrefillPrice(
        worker=worker,
        cached=cached,
        queue_s=sum(queue_s(worker, ask, new)),
        load_s=load_s,
        compute_s=model.prompt_seconds(new, cached, chunk),
        last_tokens=(new - 1) % chunk + 1 if new else 0,
        balance_s=ahead * sequence_s(model, whole_s),
    )


def price_local(decode: DecodePrice, ask: Ask) -> Priced:
    """The decode worker computes everything that it does not hold."""
    return _priced(
        decode,
        None,
        decode.begin_s + decode.queue_s,
        decode.compute_s + decode.beside_s,
        0.0,
        decode.load_s,
        decode.compute_s * decode.streams,
        decode.ahead * sequence_s(decode.worker.prefill_model, decode.whole_s),
        ask.targets,
    )


def price_pair(decode: DecodePrice, prefill: PrefillPrice, ask: Ask) -> Priced:
    """Blocks are pulled while the next ones are computed; those of the last step, and a link that is slower
    than the computing, are waited for."""
    worker, pull_tokens = decode.worker, ask.shareable - decode.cached
    rate = worker.link_nbytes_per_s.get(prefill.worker.incarnation) or LINK_GUESS_NBYTES_PER_S
    token_pull_s = decode.token_nbytes / rate
    last_tokens = min(pull_tokens, max(prefill.last_tokens, worker.fingerprint.block_size))
    pull_balance_s = SEQUENCE_SHARE * (ask.shareable * token_pull_s + FOLLOWING_TOKENS * decode.itl_s)
    exposed_s = max(pull_tokens * token_pull_s - prefill.compute_s, last_tokens * token_pull_s)
    return _priced(
        decode,
        prefill,
        max(decode.begin_s, prefill.queue_s) + decode.meet_s,
        prefill.compute_s + decode.rest_s + decode.rest_beside_s,
        CALL_S + exposed_s,
        prefill.load_s + max(0.0, decode.load_s - prefill.seconds),
        decode.rest_s * decode.streams,
        prefill.balance_s + decode.ahead * pull_balance_s,
        ask.targets,
    )


def _priced(
    decode: DecodePrice,
    prefill: PrefillPrice | None,
    wait_s: float,
    prefill_s: float,
    transfer_s: float,
    load_s: float,
    harm_s: float,
    balance_s: float,
    targets: Targets,
) -> Priced:
    ttft_s, itl_s = wait_s + prefill_s + transfer_s + load_s, decode.itl_s
    cost_s = ttft_s + HARM * harm_s + FOLLOWING_TOKENS * itl_s + balance_s
    missed = ttft_s / targets.ttft_s if targets.ttft_s else 0.0
    if targets.itl_s:
        missed = max(missed, itl_s / targets.itl_s)
    return Priced(decode, prefill, wait_s, prefill_s, transfer_s, load_s, ttft_s, harm_s, cost_s, missed)


def queue_s(worker: WorkerView, ask: Ask, tokens: int, beside_s: float = 0.0) -> tuple[float, float]:
    """Seconds until the step that runs has ended, and from then until the prompts before ours are computed,
    as far as `tokens` of ours wait for them. `beside_s`: what decoding adds to a step.

    With each step that computes prompts a State comes, which says how much of the next one is over; of one
    that only decodes, half is. Half of each step goes to the shortest prompt. The queue's contexts are not
    known: taken for prompts like ours.
    """
    queued, chunk = worker.queued_tokens, worker.chunk_tokens
    if queued <= 0:
        return (worker.decode_model.a + beside_s) / 2 if worker.running else 0.0, 0.0
    model, context = worker.prefill_model, min(queued, ask.tokens) / 2
    first = min(queued, chunk)
    present_s = model.seconds(first, first * context) + beside_s
    left = queued - first
    steps = -(-left // chunk)
    if tokens * (worker.waiting + 1) < queued:  # shorter than the mean: ours is half of each step, all full
        ours = -(-2 * tokens // chunk)
        left, steps = min(left, ours * chunk - tokens), ours - -(-tokens // chunk)
    queued_s = model.b * left + model.c * left * context + steps * (model.a + beside_s)
    return max(0.0, present_s - max(0.0, ask.now - worker.step_began_at)), queued_s


def slot_s(worker: WorkerView, step_s: float) -> float:
    """Seconds until one of those that run has ended, where all places are taken; ends are spread evenly."""
    over = worker.load + 1 - worker.max_num_seqs
    if not worker.max_num_seqs or over <= 0:
        return 0.0
    return over * GUESSED_ANSWER_TOKENS * step_s / worker.max_num_seqs


def spared(worker: WorkerView, found: Found, token_s: float, at_most: int) -> tuple[int, float]:
    """Tokens that it need not compute, of `at_most`, and the seconds in which they are loaded.

    `token_s`: seconds to compute one. A tier that is slower than that, or of unknown speed, ends the row.
    """
    tokens, seconds = 0, 0.0
    for tier in TIERS:
        count = found.get(tier, 0) * worker.fingerprint.block_size
        each = 0.0 if tier == "device" else worker.tier_token_s.get(tier, inf)
        if count and each >= token_s:
            break
        count = min(count, at_most - tokens)
        tokens += count
        seconds += count * each if count else 0.0
    return tokens, seconds


@lru_cache(maxsize=64)
def token_nbytes(fingerprint: Fingerprint) -> int:
    """Bytes of a token's KV."""
    dtype, _, skipped = fingerprint.kv_dtype.partition("/skip=")
    return KVLayout(
        fingerprint.num_layers,
        fingerprint.num_kv_heads,
        fingerprint.head_dim,
        fingerprint.block_size,
        dtype,
        parse_layers(skipped, fingerprint.num_layers),
    ).bytes_per_token
