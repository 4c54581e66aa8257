"""A channel between processes of a cluster: its calls carry the token, and a renewed certificate."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import grpc

from wire.token import KEY

RENEWED_GRACE_S = 24 * 3600.0
"""How long calls may go on over the connection that was made with an older certificate."""


class ClusterChannel(grpc.aio.Channel):
    """`open_inner` makes the connection, of files whose content `version` tells: when that has changed, the
    next call goes over a new one, and the old one ends with its calls. (gRPC's own channels keep what they
    were made with. Its interceptors could add the token too, at a price for each message.)
    """

    def __init__(
        self, open_inner: Callable[[], grpc.aio.Channel], version: Callable[[], object], token: str
    ) -> None:
        self._open_inner, self._version = open_inner, version
        self._metadata = ((KEY, f"Bearer {token}"),) if token else None
        self._made_of, self._inner = version(), open_inner()
        self._closing: set[asyncio.Task[None]] = set()

    def unary_unary(self, *args: Any, **kwargs: Any) -> Any:
        return self._caller("unary_unary", args, kwargs)

    def unary_stream(self, *args: Any, **kwargs: Any) -> Any:
        return self._caller("unary_stream", args, kwargs)

    def stream_unary(self, *args: Any, **kwargs: Any) -> Any:
        return self._caller("stream_unary", args, kwargs)

    def stream_stream(self, *args: Any, **kwargs: Any) -> Any:
        return self._caller("stream_stream", args, kwargs)

    async def __aenter__(self) -> ClusterChannel:
        return self

    async def __aexit__(self, *exception: Any) -> None:
        await self.close()

    async def close(self, grace: float | None = None) -> None:
        for task in self._closing:
            task.cancel()
        await asyncio.gather(*self._closing, return_exceptions=True)
        await self._inner.close(grace)

    def get_state(self, try_to_connect: bool = False) -> grpc.ChannelConnectivity:
        return self._inner.get_state(try_to_connect)

    async def wait_for_state_change(self, last_observed_state: grpc.ChannelConnectivity) -> None:
        await self._inner.wait_for_state_change(last_observed_state)

    async def channel_ready(self) -> None:
        await self._inner.channel_ready()

    def _caller(self, kind: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Callable[..., Any]:
        def call(*a: Any, **k: Any) -> Any:
            return getattr(self._current(), kind)(*args, **kwargs)(*a, metadata=self._metadata, **k)

        return call

    def _current(self) -> grpc.aio.Channel:
        version = self._version()
        if version != self._made_of:
            task = asyncio.get_running_loop().create_task(self._retire(self._inner))
            self._closing.add(task)
            task.add_done_callback(self._closing.discard)
            self._made_of, self._inner = version, self._open_inner()
        return self._inner

    @staticmethod
    async def _retire(channel: grpc.aio.Channel) -> None:
        try:
            await channel.close(RENEWED_GRACE_S)
        finally:
            await channel.close()
