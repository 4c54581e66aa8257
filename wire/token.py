"""The cluster token: every call between processes of a cluster carries it, every server refuses one without.

It travels as metadata of the call, in the clear unless the channel is TLS.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from secrets import compare_digest
from typing import NoReturn

import grpc

from core import log
from core.clock import Clock, monotonic
from core.errors import ConfigError

KEY = "authorization"
MIN_CHARS = 16
OPEN_METHODS = frozenset({"/grpc.health.v1.Health/Check"})
"""Kubernetes' gRPC probes can send no metadata, and this says nothing but whether the worker serves."""

REFUSAL = "the cluster token is missing or wrong; start all processes with the same BATON_CLUSTER_TOKEN"
LOG_EVERY_S = 60.0

_log = log.get("wire")


def check(token: str) -> None:
    """Raises ConfigError for a token that is easily guessed or that metadata cannot carry."""
    if token and (len(token) < MIN_CHARS or not token.isascii() or not token.isprintable() or " " in token):
        raise ConfigError(
            f"the cluster token needs {MIN_CHARS} printable ASCII characters or more and no space; "
            "make one with `openssl rand -hex 32`"
        )


class TokenGuard(grpc.aio.ServerInterceptor):
    """Refuses calls without the token, before anything of them is read. `refused` is called for each."""

    def __init__(self, token: str, refused: Callable[[], None], clock: Clock = monotonic) -> None:
        self._expected = f"Bearer {token}".encode()
        self._refused, self._clock = refused, clock
        self._unlogged, self._logged_at = 0, -LOG_EVERY_S
        self._refusal = grpc.stream_stream_rpc_method_handler(self._refuse)  # a unary caller cannot tell

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler:
        details = handler_call_details
        shown = next((value for key, value in details.invocation_metadata if key == KEY), "")
        shown = shown.encode() if isinstance(shown, str) else shown
        if compare_digest(shown, self._expected) or details.method in OPEN_METHODS:
            return await continuation(details)
        self._refused()
        self._log(details.method)
        return self._refusal

    async def _refuse(self, request_iterator: object, context: grpc.aio.ServicerContext) -> NoReturn:
        await context.abort(grpc.StatusCode.UNAUTHENTICATED, REFUSAL)

    def _log(self, method: str) -> None:
        """The first at once, then what has gathered, at most once in LOG_EVERY_S."""
        self._unlogged += 1
        now = self._clock()
        if now - self._logged_at >= LOG_EVERY_S:
            _log.warning("peer.refused", method=method[:100], calls=self._unlogged, reason=REFUSAL)
            self._unlogged, self._logged_at = 0, now
