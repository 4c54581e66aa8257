"""How Baton's gRPC channels and servers are set up, alike on both ends."""

from __future__ import annotations

import grpc

MAX_MESSAGE_NBYTES = 32 * 2**20
"""A prompt of a million tokens is about 5 MB on the wire; blocks never travel in messages."""

KEEPALIVE_S = 5.0
"""A peer that vanished or froze without a word is noticed within about twice this."""

_OPTIONS = [
    ("grpc.max_send_message_length", MAX_MESSAGE_NBYTES),
    ("grpc.max_receive_message_length", MAX_MESSAGE_NBYTES),
    ("grpc.keepalive_time_ms", int(KEEPALIVE_S * 1000)),
    ("grpc.keepalive_timeout_ms", int(KEEPALIVE_S * 1000)),
    ("grpc.http2.ping_timeout_ms", int(KEEPALIVE_S * 1000)),  # by itself it would wait a minute
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.http2.min_ping_interval_without_data_ms", int(KEEPALIVE_S * 500)),
]


def connect(address: str) -> grpc.aio.Channel:
    """A channel to `host:port` that reconnects within a second of the peer's return."""
    return grpc.aio.insecure_channel(
        address,
        options=[
            *_OPTIONS,
            ("grpc.initial_reconnect_backoff_ms", 100),
            ("grpc.max_reconnect_backoff_ms", 1000),
            ("grpc.use_local_subchannel_pool", 1),
        ],
    )


def server() -> grpc.aio.Server:
    return grpc.aio.server(options=[*_OPTIONS, ("grpc.so_reuseport", 0), ("grpc.http2.max_ping_strikes", 0)])
