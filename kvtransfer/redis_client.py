"""redis-py as the Redis tier uses it: one URL for a server or a cluster, pipelines, foreign errors."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import suppress
from typing import Any
from urllib.parse import urlsplit

from redis import retry as blocking
from redis.asyncio import Redis, RedisCluster
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.connection import ConnectionPool, parse_url
from redis.exceptions import RedisClusterException, RedisError, ResponseError

from core.errors import ConfigError

SCHEMES = ("redis", "rediss", "unix", "redis+cluster", "rediss+cluster")

FAULTS = (RedisError, RedisClusterException, OSError)
"""No answer, or not one that Redis gives: refused, timed out, lost, wrong password, no Redis at all."""

MAX_CONNECTIONS = 16
"""To one server. Whoever would need more waits for its turn before it asks: see `RedisTier`."""

SCAN_COUNT = 1000
"""Slots of its table that a server looks at for one answer, well under a millisecond."""

Command = tuple[str | bytes, ...]


class RedisClient:
    """`redis://[[user]:password@]host:port[/db]`, `rediss://` with TLS, `unix://path`; with `+cluster`
    after the scheme any node of a cluster. redis-py's options go behind `?`, among them
    `ssl_ca_certs=PATH`. Connects on first use. Raises ConfigError for a URL that it cannot read, and for one
    that allows fewer connections than MAX_CONNECTIONS.
    """

    def __init__(self, url: str) -> None:
        # No error quotes the URL, nor redis-py's words on it: a password with a slash in it reads as a port.
        scheme, _, rest = url.partition("://")
        if scheme not in SCHEMES:
            raise ConfigError(f"the Redis URL begins with none of {', '.join(s + '://' for s in SCHEMES)}")
        # an idle connection that the server closed shows at its next use: once more, at once
        options = {"retry": Retry(NoBackoff(), 1), "max_connections": MAX_CONNECTIONS}
        self._client: Redis | RedisCluster
        self._pools: dict[tuple[str, int] | None, ConnectionPool] = {}
        node_url = f"{scheme.removesuffix('+cluster')}://{rest}"
        try:
            self.address = _without_secrets(url)
            self._pool_options = parse_url(node_url)
            if scheme.endswith("+cluster"):
                self._client = RedisCluster.from_url(node_url, **options)
                allowed = self._client.connection_kwargs["max_connections"]
            else:
                self._client = Redis.from_url(url, **options)
                allowed = self._client.connection_pool.max_connections
            self.is_cluster = isinstance(self._client, RedisCluster)
        except (ValueError, TypeError, RedisError, RedisClusterException):
            raise ConfigError(
                "the Redis URL cannot be used; write scheme://[[user]:password@]host[:port][/db][?option=value]"
                ", special characters of user and password percent-encoded"
            ) from None
        if allowed < MAX_CONNECTIONS:
            raise ConfigError(
                f"max_connections={allowed} in the Redis URL is too few; "
                f"leave it out or write {MAX_CONNECTIONS} or more"
            )

    async def run(self, commands: Sequence[Command], timeout_s: float) -> list[Any]:
        """The replies of one pipeline in order; an error that the server replied stands in its place.

        Raises one of FAULTS, TimeoutError (an OSError) after `timeout_s`.
        """
        pipeline = self._client.pipeline(transaction=False)
        for command in commands:
            pipeline.execute_command(*command)
        async with asyncio.timeout(timeout_s):
            replies = await pipeline.execute(raise_on_error=False)
        for reply in replies:
            if isinstance(reply, FAULTS) and not isinstance(reply, ResponseError):
                raise reply
        return replies

    async def pools(self, keys: Sequence[str], timeout_s: float) -> list[ConnectionPool]:
        """For each key blocking connections to the server that has it; `timeout_s` bounds each silence.

        They belong to this client. Raises as `run` does.
        """
        if not isinstance(self._client, RedisCluster):
            return [self._pool(None, timeout_s)] * len(keys)
        async with asyncio.timeout(timeout_s):
            await self._client.initialize()
        nodes = [self._client.get_node_from_key(key) for key in keys]
        return [self._pool((node.host, int(node.port)) if node else None, timeout_s) for node in nodes]

    def _pool(self, node: tuple[str, int] | None, timeout_s: float) -> ConnectionPool:
        """Of this node of a cluster; None: of what the URL names."""
        if node not in self._pools:
            options = self._pool_options | {
                "protocol": 2,
                "retry": blocking.Retry(
                    NoBackoff(), 0
                ),  # a pool looks at an idle connection before it is used
                "socket_timeout": timeout_s,
                "socket_connect_timeout": timeout_s,
            }
            if node is not None:
                options |= {"host": node[0], "port": node[1]}
            self._pools[node] = ConnectionPool(**options)
        return self._pools[node]

    async def keys(self, prefix: str, timeout_s: float) -> AsyncIterator[bytes]:
        """All keys that begin so, by SCAN and on every node; one may come twice. Raises as `run` does, after
        `timeout_s` without an answer."""
        found = self._client.scan_iter(match=f"{prefix}*", count=SCAN_COUNT)
        while True:
            try:
                async with asyncio.timeout(timeout_s):
                    key = await anext(found)
            except StopAsyncIteration:
                return
            yield key

    async def close(self, timeout_s: float) -> None:
        """Idempotent."""
        with suppress(*FAULTS):
            async with asyncio.timeout(timeout_s):
                await self._client.aclose()
        for pool in self._pools.values():
            pool.disconnect()


def _without_secrets(url: str) -> str:
    """For the log: scheme, host and port, or the socket's path."""
    parts = urlsplit(url)
    if parts.scheme == "unix":
        return f"unix://{parts.path}"
    port = f":{parts.port}" if parts.port else ""
    return f"{parts.scheme}://{parts.hostname}{port}"
