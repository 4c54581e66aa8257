"""gRPC status codes <-> the error tree: foreign errors are translated here, once.

An error travels as a status code plus trailing metadata `baton-code` (a `core.errors` code) and,
where it has one, `baton-param`.
"""

from __future__ import annotations

from typing import NoReturn

import grpc

from core import errors
from core.errors import BatonError

_STATUS: tuple[tuple[type[BatonError], grpc.StatusCode], ...] = (
    (errors.IncompatiblePeer, grpc.StatusCode.FAILED_PRECONDITION),
    (errors.LeaseLost, grpc.StatusCode.NOT_FOUND),
    (errors.NotFound, grpc.StatusCode.NOT_FOUND),
    (errors.Unauthorized, grpc.StatusCode.UNAUTHENTICATED),
    (errors.RequestError, grpc.StatusCode.INVALID_ARGUMENT),
    (errors.Overloaded, grpc.StatusCode.RESOURCE_EXHAUSTED),
    (errors.Unavailable, grpc.StatusCode.UNAVAILABLE),
    (errors.SourceFailed, grpc.StatusCode.ABORTED),
)


def _subclasses(kind: type[BatonError]) -> list[type[BatonError]]:
    return [kind, *(deeper for child in kind.__subclasses__() for deeper in _subclasses(child))]


_BY_CODE = {kind.code: kind for kind in _subclasses(BatonError) if kind.code}


def rebuild(code: str, message: str, param: str | None = None) -> BatonError:
    """The error that a `code` and its sentence stand for; an unknown code is an EngineFault."""
    kind = _BY_CODE.get(code, errors.EngineFault)
    error = kind.__new__(kind)
    BatonError.__init__(error, message, param=param)
    if isinstance(error, errors.Overloaded):
        error.retry_after_s = 1.0
    if isinstance(error, errors.IncompatiblePeer):
        error.field = param or ""
    return error


async def abort(context: grpc.aio.ServicerContext, error: BatonError) -> NoReturn:
    """End this call with `error`."""
    status = next((s for kind, s in _STATUS if isinstance(error, kind)), grpc.StatusCode.INTERNAL)
    param = error.field if isinstance(error, errors.IncompatiblePeer) else error.param
    metadata = [("baton-code", error.code or "")]
    if param:
        metadata.append(("baton-param", param))
    await context.abort(status, error.message, tuple(metadata))


def from_rpc(error: grpc.aio.AioRpcError, peer: str) -> BatonError:
    """The core error behind a failed call to `peer`.

    A call that never reached a handler of ours (refused, reset, timed out) is PeerLost.
    """
    metadata = dict(error.trailing_metadata() or ())
    code = metadata.get("baton-code")
    if code:
        return rebuild(str(code), error.details() or "", str(metadata.get("baton-param", "")) or None)
    return errors.PeerLost(f"{peer}: {error.code().name.lower()} ({error.details()})")
