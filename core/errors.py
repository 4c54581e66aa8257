"""The error tree, named for what the caller can do about it.

BatonError
├── ConfigError              fix the command line, file or model; processes exit 2 with the sentence
├── RequestError             the client must change the request (HTTP 4xx, never retried, never a fault)
│   ├── InvalidParameter         400, names the parameter
│   ├── ContextLengthExceeded    400, names both numbers
│   ├── NotFound                 404
│   ├── Conflict                 409, as things stand it would do harm; change them first
│   ├── PayloadTooLarge          413
│   └── Unauthorized             401
├── Overloaded               429, come back after `retry_after_s`; busy is not broken
├── Unavailable              503, nobody can answer this now; `retry_after_s` where that soon changes
├── WorkerLost               a worker, or a rank of it, died, hung or was cut off while it held the request
├── EngineFault              the engine raised in a step; the request that it hit is over
│   └── RequestPoisoned          two workers ended with it: it is not tried on a third
└── SourceFailed             a block source did not deliver: always a miss, never shown to a client
    ├── LeaseLost                lease ended, expired or has another epoch
    ├── ChecksumMismatch         the bytes read are not the bytes published
    ├── PeerLost                 the other process or the link is gone
    └── IncompatiblePeer         fingerprints differ; names the field and both values
"""

from __future__ import annotations

from typing import Any

SOON_S = 1.0
"""When to come back for what changes by itself."""


class BatonError(Exception):
    """Base of all. `http_status`, `error_type` and `code` follow OpenAI's envelope; `retry_after_s`: the same
    request may succeed then; None where that is not known."""

    http_status = 500
    error_type = "internal_error"
    code: str | None = "internal_error"
    retry_after_s: float | None = None

    def __init__(self, message: str, *, param: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param

    def envelope(self) -> dict[str, Any]:
        """The OpenAI error body: `{"error": {message, type, param, code}}`."""
        return {
            "error": {
                "message": self.message,
                "type": self.error_type,
                "param": self.param,
                "code": self.code,
            }
        }


class ConfigError(BatonError):
    """Settings, files or a model that cannot work. The message says what and what to do."""


class RequestError(BatonError):
    http_status = 400
    error_type = "invalid_request_error"
    code = "invalid_request"


class InvalidParameter(RequestError):
    code = "invalid_parameter"


class ContextLengthExceeded(RequestError):
    code = "context_length_exceeded"


class NotFound(RequestError):
    http_status = 404
    code = "not_found"


class ModelNotFound(NotFound):
    code = "model_not_found"


class Conflict(RequestError):
    http_status = 409
    code = "conflict"


class PayloadTooLarge(RequestError):
    http_status = 413
    code = "payload_too_large"


class Unauthorized(RequestError):
    http_status = 401
    error_type = "authentication_error"
    code = "invalid_api_key"


class Overloaded(BatonError):
    http_status = 429
    error_type = "overloaded_error"
    code = "overloaded"

    def __init__(self, message: str, *, retry_after_s: float = SOON_S) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class Unavailable(BatonError):
    http_status = 503
    error_type = "service_unavailable_error"
    code = "unavailable"

    def __init__(self, message: str, *, retry_after_s: float | None = None) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class WorkerLost(BatonError):
    http_status = 503
    error_type = "service_unavailable_error"
    code = "worker_lost"


class EngineFault(BatonError):
    code = "engine_fault"


class RequestPoisoned(EngineFault):
    code = "request_poisoned"


class SourceFailed(BatonError):
    code = "source_failed"


class LeaseLost(SourceFailed):
    code = "lease_lost"


class ChecksumMismatch(SourceFailed):
    code = "checksum_mismatch"


class PeerLost(SourceFailed):
    code = "peer_lost"


class IncompatiblePeer(SourceFailed):
    code = "incompatible_peer"

    def __init__(self, field: str, ours: object, theirs: object) -> None:
        super().__init__(
            f"fingerprints differ in {field}: {ours!r} here, {theirs!r} there; "
            f"start both workers with the same model and the same {field}"
        )
        self.field = field
