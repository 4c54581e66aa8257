"""How Baton's gRPC channels and servers are set up, alike on both ends: options, TLS, the cluster token."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import grpc

from core.errors import ConfigError
from core.settings import Settings
from wire import token
from wire.certificates import ClusterTLS
from wire.cluster_channel import ClusterChannel

MAX_MESSAGE_NBYTES = 32 * 2**20
"""A prompt of a million tokens is about 5 MB on the wire; blocks never travel in messages."""

MAX_METADATA_NBYTES = 16 * 2**10
"""Of one call; the longest that we send is an error's sentence."""

MAX_CALLS_PER_CONNECTION = 4096
MAX_CALLS = 16384
"""At one time, of all peers of a server; beyond it a call is refused as busy."""

KEEPALIVE_S = 5.0
"""A peer that vanished or froze without a word is noticed within about twice this."""

_OPTIONS: list[tuple[str, int | str]] = [
    ("grpc.max_send_message_length", MAX_MESSAGE_NBYTES),
    ("grpc.max_receive_message_length", MAX_MESSAGE_NBYTES),
    ("grpc.max_metadata_size", MAX_METADATA_NBYTES),
    ("grpc.absolute_max_metadata_size", MAX_METADATA_NBYTES),
    ("grpc.keepalive_time_ms", int(KEEPALIVE_S * 1000)),
    ("grpc.keepalive_timeout_ms", int(KEEPALIVE_S * 1000)),
    ("grpc.http2.ping_timeout_ms", int(KEEPALIVE_S * 1000)),  # by itself it would wait a minute
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.http2.min_ping_interval_without_data_ms", int(KEEPALIVE_S * 500)),
    ("grpc.enable_http_proxy", 0),  # of the environment: between processes of a cluster there is none
]


@dataclass(frozen=True, slots=True)
class Identity:
    """What a process shows to the others of its cluster, and asks them to show. Without both it is open."""

    token: str = field(default="", repr=False)
    tls: ClusterTLS | None = None

    @classmethod
    def of(cls, settings: Settings) -> Identity:
        """Raises ConfigError for a token or for files that cannot work."""
        token.check(settings.cluster_token)
        paths = (settings.cluster_tls_cert, settings.cluster_tls_key, settings.cluster_tls_ca)
        tls = ClusterTLS(*paths, settings.cluster_tls_name) if any(paths) else None
        if settings.cluster_tls_name and tls is None:
            raise ConfigError("--cluster-tls-name needs --cluster-tls-cert, -key and -ca too")
        return cls(settings.cluster_token, tls)

    def weakness(self) -> str:
        """What is wrong with showing this on a network; empty = nothing."""
        if self.tls is not None:
            return ""
        how = "set --cluster-tls-cert, --cluster-tls-key and --cluster-tls-ca"
        if self.token:
            return f"prompts and the cluster token travel in the clear; {how}"
        return f"whoever reaches this port may use it; set BATON_CLUSTER_TOKEN, and best TLS too: {how}"


OPEN = Identity()


def connect(address: str, identity: Identity = OPEN) -> grpc.aio.Channel:
    """A channel to `host:port` that reconnects within a second of the peer's return."""
    options = [
        *_OPTIONS,
        ("grpc.initial_reconnect_backoff_ms", 100),
        ("grpc.max_reconnect_backoff_ms", 1000),
        ("grpc.use_local_subchannel_pool", 1),
    ]
    target, tls = f"dns:///{address}", identity.tls  # else "unix:8" would be a path
    if tls and tls.name:
        options.append(("grpc.ssl_target_name_override", tls.name))

    def opened() -> grpc.aio.Channel:
        if tls is None:
            return grpc.aio.insecure_channel(target, options=options)
        return grpc.aio.secure_channel(target, tls.channel_credentials(), options=options)

    if tls is None and not identity.token:
        return opened()
    return ClusterChannel(opened, tls.newest if tls else lambda: None, identity.token)


def server(identity: Identity = OPEN, refused: Callable[[], None] = lambda: None) -> grpc.aio.Server:
    """`refused` is called for each call that comes without the identity's token."""
    options = [
        *_OPTIONS,
        ("grpc.so_reuseport", 0),
        ("grpc.http2.max_ping_strikes", 0),
        ("grpc.max_concurrent_streams", MAX_CALLS_PER_CONNECTION),
    ]
    guards = [token.TokenGuard(identity.token, refused)] if identity.token else []
    return grpc.aio.server(interceptors=guards, options=options, maximum_concurrent_rpcs=MAX_CALLS)


def listen(on: grpc.aio.Server, address: str, identity: Identity = OPEN) -> int:
    """Let a server that is not started yet listen on `host:port`; returns the port. Raises ConfigError."""
    try:
        if identity.tls is None:
            return on.add_insecure_port(address)
        return on.add_secure_port(address, identity.tls.server_credentials())
    except RuntimeError as error:
        raise ConfigError(f"cannot listen on {address}: {error}; choose another --listen") from None
