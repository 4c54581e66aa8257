"""Messages <-> core values. The only place that knows both."""

from __future__ import annotations

from core.kv import Fingerprint
from core.request import (
    FinishReason,
    Gathered,
    Grammar,
    PrefillTarget,
    Request,
    SamplingParams,
    TokenDelta,
    TokenLogprob,
)
from core.step_model import StepModel
from wire.v1 import generation_pb2 as gen
from wire.v1 import kv_pb2 as kv
from wire.v1 import worker_pb2 as worker


def fingerprint_to_wire(value: Fingerprint) -> kv.Fingerprint:
    return kv.Fingerprint(**value.as_dict())  # type: ignore[arg-type]


def fingerprint_from_wire(message: kv.Fingerprint) -> Fingerprint:
    return Fingerprint(**{name: getattr(message, name) for name in Fingerprint.__dataclass_fields__})


def step_model_to_wire(value: StepModel) -> worker.StepModel:
    return worker.StepModel(a=value.a, b=value.b, c=value.c, num_steps=value.num_steps)


def step_model_from_wire(message: worker.StepModel) -> StepModel:
    return StepModel(message.a, message.b, message.c, message.num_steps)


def request_to_wire(request: Request) -> gen.Start:
    s = request.sampling
    sampling = gen.Sampling(
        max_tokens=s.max_tokens,
        seed=s.seed,
        min_tokens=s.min_tokens,
        n=s.n,
        temperature=s.temperature,
        top_p=s.top_p,
        top_k=s.top_k,
        min_p=s.min_p,
        presence_penalty=s.presence_penalty,
        frequency_penalty=s.frequency_penalty,
        repetition_penalty=s.repetition_penalty,
        stop_token_ids=sorted(s.stop_token_ids),
        logit_bias=dict(s.logit_bias),
        allowed_token_ids=s.allowed_token_ids,
        bad_words=[gen.BadWord(token_ids=word) for word in s.bad_words],
        grammar=None if s.grammar is None else gen.Grammar(text=s.grammar.text, param=s.grammar.param),
        logprobs=s.logprobs,
        prompt_logprobs=s.prompt_logprobs,
    )
    target = request.prefill
    return gen.Start(
        request_id=request.request_id,
        prompt_token_ids=request.prompt_token_ids,
        block_hashes=request.block_hashes,
        cache_salt=request.cache_salt,
        sampling=sampling,
        prefill=None
        if target is None
        else gen.PrefillTarget(
            worker_id=target.worker_id,
            address=target.address,
            incarnation=target.incarnation,
            min_tokens=target.min_tokens,
            cached_blocks=target.cached_blocks,
            token_s=target.token_s,
            queue_s=target.queue_s,
        ),
        epoch=request.epoch,
        resumed=[gen.Output(index=index, token_ids=token_ids) for index, token_ids in request.resumed],
        itl_slo_s=request.itl_slo_s,
    )


def request_from_wire(message: gen.Start) -> Request:
    s = message.sampling
    sampling = SamplingParams(
        max_tokens=s.max_tokens,
        seed=s.seed,
        min_tokens=s.min_tokens,
        n=s.n,
        temperature=s.temperature,
        top_p=s.top_p,
        top_k=s.top_k,
        min_p=s.min_p,
        presence_penalty=s.presence_penalty,
        frequency_penalty=s.frequency_penalty,
        repetition_penalty=s.repetition_penalty,
        stop_token_ids=frozenset(s.stop_token_ids),
        logit_bias=tuple(sorted(s.logit_bias.items())),
        allowed_token_ids=tuple(s.allowed_token_ids),
        bad_words=tuple(tuple(word.token_ids) for word in s.bad_words),
        grammar=Grammar(s.grammar.text, s.grammar.param) if s.HasField("grammar") else None,
        logprobs=s.logprobs if s.HasField("logprobs") else None,
        prompt_logprobs=s.prompt_logprobs,
    )
    target = None
    if message.HasField("prefill"):
        p = message.prefill
        target = PrefillTarget(
            p.worker_id, p.address, p.incarnation, p.min_tokens, p.cached_blocks, p.token_s, p.queue_s
        )
    return Request(
        request_id=message.request_id,
        prompt_token_ids=tuple(message.prompt_token_ids),
        sampling=sampling,
        block_hashes=tuple(message.block_hashes),
        cache_salt=message.cache_salt,
        prefill=target,
        epoch=message.epoch,
        resumed=tuple((output.index, tuple(output.token_ids)) for output in message.resumed),
        itl_slo_s=message.itl_slo_s,
    )


def _logprob_to_wire(value: TokenLogprob | None) -> gen.TokenLogprob:
    if value is None:
        return gen.TokenLogprob()
    return gen.TokenLogprob(
        token_id=value.token_id,
        logprob=value.logprob,
        top_ids=[token for token, _ in value.top],
        top_logprobs=[logprob for _, logprob in value.top],
    )


def _logprob_from_wire(message: gen.TokenLogprob) -> TokenLogprob | None:
    if not message.HasField("token_id"):
        return None
    top = tuple(zip(message.top_ids, message.top_logprobs, strict=True))
    return TokenLogprob(message.token_id, message.logprob, top)


def delta_to_wire(delta: TokenDelta) -> gen.Delta:
    return gen.Delta(
        request_id=delta.request_id,
        index=delta.index,
        token_ids=delta.token_ids,
        logprobs=[_logprob_to_wire(value) for value in delta.logprobs],
        finish_reason=delta.finish_reason or "",
        gathered=None if delta.gathered is None else _gathered_to_wire(delta.gathered),
        prompt_logprobs=[_logprob_to_wire(value) for value in delta.prompt_logprobs],
    )


def delta_from_wire(message: gen.Delta) -> TokenDelta:
    finish_reason, logprobs, prompt_logprobs = message.finish_reason, (), ()
    if message.logprobs:
        values = map(_logprob_from_wire, message.logprobs)
        logprobs = tuple(value for value in values if value is not None)
    if message.prompt_logprobs:
        prompt_logprobs = tuple(map(_logprob_from_wire, message.prompt_logprobs))
    return TokenDelta(
        message.request_id,
        message.index,
        tuple(message.token_ids),
        logprobs,
        FinishReason(finish_reason) if finish_reason else None,
        _gathered_from_wire(message.gathered) if message.HasField("gathered") else None,
        prompt_logprobs,
    )


def _gathered_to_wire(value: Gathered) -> gen.Gathered:
    plain = {name: getattr(value, name) for name in Gathered.__dataclass_fields__}
    plain["tier_tokens"] = dict(value.tier_tokens)
    return gen.Gathered(**plain)


def _gathered_from_wire(message: gen.Gathered) -> Gathered:
    plain = {name: getattr(message, name) for name in Gathered.__dataclass_fields__}
    plain["tier_tokens"] = tuple(sorted(message.tier_tokens.items()))
    return Gathered(**plain)
