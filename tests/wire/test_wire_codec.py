"""Core values survive the wire, errors keep their kind."""

from __future__ import annotations

import grpc
import pytest

from core import errors
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
from wire import channel, codec, status
from wire.v1 import prefill_pb2, prefill_pb2_grpc

FULL = SamplingParams(
    max_tokens=3, seed=2**64 - 1, min_tokens=1, n=2, temperature=0.7, top_p=0.9, top_k=40, min_p=0.05, presence_penalty=-0.3,
    frequency_penalty=0.2, repetition_penalty=1.3, stop_token_ids=frozenset({0, 2}), logit_bias=((0, -1.5), (7, 100.0)),
    allowed_token_ids=(0, 49151), bad_words=((5,), (0, 6)), grammar=Grammar('{"grammars": []}', "response_format"),
    logprobs=0, prompt_logprobs=True,
)  # fmt: skip


@pytest.mark.parametrize(
    "request_",
    [
        Request("a", (1, 2), SamplingParams(max_tokens=1, seed=0)),
        Request(
            "b", (0, 49151), FULL, (b"x" * 32, b"y" * 32), "salt", PrefillTarget("p", "h:1", "life", 64), 7
        ),
    ],
)
def test_requests(request_: Request) -> None:
    assert codec.request_from_wire(codec.request_to_wire(request_)) == request_


@pytest.mark.parametrize(
    "delta",
    [
        TokenDelta("a", 0, (5,)),
        TokenDelta(
            "a", 3, (5, 6), (TokenLogprob(5, -0.5, ((5, -0.5), (0, -2.0))), TokenLogprob(0, -1.0)), FinishReason.STOP,
            Gathered(cached_tokens=16, remote_tokens=32, transfer_s=0.25, source_error="peer_lost: gone"),
            (None, TokenLogprob(1, -1.0)),
        ),
    ],
)  # fmt: skip
def test_deltas(delta: TokenDelta) -> None:
    assert codec.delta_from_wire(codec.delta_to_wire(delta)) == delta


def test_fingerprints() -> None:
    value = Fingerprint("m", "t", 30, 3, 64, 16, "fp32", "default/100000", 8192)
    assert codec.fingerprint_from_wire(codec.fingerprint_to_wire(value)) == value


@pytest.mark.parametrize(
    "error",
    [
        errors.IncompatiblePeer("kv_dtype", "fp32", "bf16"),
        errors.LeaseLost("gone"),
        errors.Overloaded("busy"),
        errors.Unavailable("draining"),
        errors.ContextLengthExceeded("too long"),
        errors.InvalidParameter("bad", param="prompt"),
    ],
)
async def test_errors_keep_their_kind_over_a_real_call(error: errors.BatonError) -> None:
    class Service(prefill_pb2_grpc.PrefillServicer):
        async def Renew(self, request, context):
            await status.abort(context, error)

    server = channel.server()
    prefill_pb2_grpc.add_PrefillServicer_to_server(Service(), server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    async with channel.connect(f"127.0.0.1:{port}") as open_channel:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await prefill_pb2_grpc.PrefillStub(open_channel).Renew(prefill_pb2.RenewRequest(), timeout=5)
    await server.stop(0)
    rebuilt = status.from_rpc(caught.value, "peer")
    assert type(rebuilt) is type(error)
    assert rebuilt.message == error.message
    assert rebuilt.param == (error.field if isinstance(error, errors.IncompatiblePeer) else error.param)


async def test_a_call_that_reaches_nobody_is_a_lost_peer() -> None:
    async with channel.connect("127.0.0.1:1") as open_channel:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await prefill_pb2_grpc.PrefillStub(open_channel).Renew(prefill_pb2.RenewRequest(), timeout=5)
    assert isinstance(status.from_rpc(caught.value, "p0"), errors.PeerLost)


def test_an_unknown_code_is_an_engine_fault() -> None:
    assert isinstance(status.rebuild("from_the_future", "?"), errors.EngineFault)
