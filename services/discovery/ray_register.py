"""Workers' leases in the key-value store of a Ray cluster's head (GCS): address -> its last beat.

Only the store is used, over gRPC with Ray's own messages. To join as a Ray driver would bind this process
to the cluster: Ray ends a driver 60 seconds after the head fell silent, and a router has streams to finish.
The store has no leases; `beats` makes them.
"""

from __future__ import annotations

import os
from collections.abc import Awaitable
from typing import Any

import grpc

from core.clock import Clock, monotonic
from core.errors import ConfigError, Unavailable
from services import address as hosts
from services.discovery.beats import Beats, beat

DEFAULT_NAMESPACE = "baton"
PREFIX = b"workers:"
TIMEOUT_S = 2.0
"""Longest silence of the head."""

ADDRESS = "RAY_ADDRESS"
"""Ray's own environment variable: the head's host:port."""


class RayRegister:
    """`head`: host:port of the head (Ray's port, 6379 where nobody chose; not its client port 10001).

    Connects on first use, and again for as long as it is used. A head with Ray's TLS or tokens refuses us.
    """

    def __init__(self, head: str, namespace: str = DEFAULT_NAMESPACE, clock: Clock = monotonic) -> None:
        try:
            from ray.core.generated import gcs_service_pb2, gcs_service_pb2_grpc
        except ImportError:
            raise ConfigError("--discovery ray:// needs the package ray; pip install 'baton[ray]'") from None
        self._pb: Any = gcs_service_pb2
        self._make_stub: Any = gcs_service_pb2_grpc.InternalKVGcsServiceStub
        self.name = f"ray://{head}/{namespace}"
        self._head, self._namespace = head, namespace.encode()
        self._clock = clock
        self._beats = Beats()
        self._channel: grpc.aio.Channel | None = None

    @classmethod
    def read(cls, rest: str) -> RayRegister:
        """From `[host:port][/namespace]`; without a host, the cluster of RAY_ADDRESS. Raises ConfigError."""
        head, _, namespace = rest.partition("/")
        head = head or os.environ.get(ADDRESS, "")
        if not head:
            raise ConfigError(
                f"--discovery ray:// does not say which cluster; write ray://HEAD:6379, or set {ADDRESS}"
            )
        hosts.split(head, "--discovery ray://")
        return cls(head, namespace or DEFAULT_NAMESPACE)

    async def addresses(self) -> frozenset[str]:
        wanted = self._pb.InternalKVKeysRequest(prefix=PREFIX, namespace=self._namespace)
        keys = (await self._answer(self._store.InternalKVKeys(wanted, timeout=TIMEOUT_S))).results
        wanted = self._pb.InternalKVMultiGetRequest(keys=keys, namespace=self._namespace)
        found = (await self._answer(self._store.InternalKVMultiGet(wanted, timeout=TIMEOUT_S))).results
        entries = {each.key.removeprefix(PREFIX).decode(errors="replace"): each.value for each in found}
        live, stale = self._beats.observe(entries, self._clock())
        for each in stale:
            await self.withdraw(each)
        return live

    async def renew(self, address: str, lease_s: float) -> None:
        entry = self._pb.InternalKVPutRequest(
            key=PREFIX + address.encode(), value=beat(lease_s), overwrite=True, namespace=self._namespace
        )
        await self._answer(self._store.InternalKVPut(entry, timeout=TIMEOUT_S))

    async def withdraw(self, address: str) -> None:
        entry = self._pb.InternalKVDelRequest(key=PREFIX + address.encode(), namespace=self._namespace)
        await self._answer(self._store.InternalKVDel(entry, timeout=TIMEOUT_S))

    async def close(self) -> None:
        channel, self._channel = self._channel, None
        if channel is not None:
            await channel.close()

    @property
    def _store(self) -> Any:
        """The stub; made within the loop that uses it."""
        if self._channel is None:
            options = [("grpc.max_reconnect_backoff_ms", 1000), ("grpc.enable_http_proxy", 0)]
            self._channel = grpc.aio.insecure_channel(f"dns:///{self._head}", options=options)
        return self._make_stub(self._channel)

    async def _answer(self, call: Awaitable[Any]) -> Any:
        try:
            reply = await call
        except grpc.aio.AioRpcError as error:
            raise Unavailable(f"{self.name}: {error.details() or error.code().name}") from None
        if reply.status.code:
            raise Unavailable(f"{self.name}: {reply.status.message or reply.status.code}")
        return reply
