"""Workers' leases in Redis: one sorted set of addresses by the end of their lease.

    baton:workers     address -> when its lease ends, in milliseconds of the server's own clock

One key, so a look costs the same whether the server holds ten keys or a million blocks; and one clock, so
those of workers and routers need not agree. Time is read and used in one script, hence atomically.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import Any
from urllib.parse import urlsplit

from core.errors import ConfigError, Unavailable

KEY = "baton:workers"
TIMEOUT_S = 2.0
"""Longest silence of the server."""

_NOW = "local t = redis.call('TIME'); local now = t[1] * 1000 + math.floor(t[2] / 1000);"
_RENEW = f"{_NOW} return redis.call('ZADD', KEYS[1], now + ARGV[2], ARGV[1])"
_LOOK = f"{_NOW} return redis.call('ZRANGEBYSCORE', KEYS[1], '(' .. now, '+inf')"
_FORGET = f"{_NOW} return redis.call('ZREMRANGEBYSCORE', KEYS[1], '-inf', now)"


class RedisRegister:
    """`redis://[[user]:password@]host:port[/db]`, `rediss://` with TLS, `unix://path`; redis-py's options go
    behind `?`. Connects on first use. Raises ConfigError for a URL that it cannot read."""

    def __init__(self, url: str) -> None:
        try:
            from redis.asyncio import Redis
            from redis.asyncio.retry import Retry
            from redis.backoff import NoBackoff
            from redis.exceptions import RedisError
        except ImportError:
            raise ConfigError(
                "--discovery redis:// needs the package redis; pip install 'baton[redis]'"
            ) from None
        self._faults = (RedisError, OSError)
        try:
            self.name = without_secrets(url)
            # an idle connection that the server closed shows at its next use: once more, at once
            options = {"retry": Retry(NoBackoff(), 1), "decode_responses": True, "encoding_errors": "replace"}
            self._client = Redis.from_url(url, **options)
        except (ValueError, TypeError, RedisError):  # whose words may quote a part of the password
            raise ConfigError(
                "--discovery cannot be read as redis://[[user]:password@]host:port[/db][?option=value]; "
                "in a password write / as %2F, : as %3A and @ as %40"
            ) from None

    async def addresses(self) -> frozenset[str]:
        return frozenset(await self._run(_LOOK))

    async def renew(self, address: str, lease_s: float) -> None:
        await self._run(_RENEW, address, str(round(lease_s * 1000)))
        await self._run(_FORGET)  # so that workers which never come back do not stay for ever

    async def withdraw(self, address: str) -> None:
        try:
            async with asyncio.timeout(TIMEOUT_S):
                await self._client.zrem(KEY, address)
        except self._faults as error:
            raise self._unavailable(error) from None

    async def close(self) -> None:
        with suppress(*self._faults):
            async with asyncio.timeout(TIMEOUT_S):
                await self._client.aclose()

    async def _run(self, script: str, *arguments: str) -> Any:
        try:
            async with asyncio.timeout(TIMEOUT_S):
                return await self._client.execute_command("EVAL", script, 1, KEY, *arguments)
        except self._faults as error:
            raise self._unavailable(error) from None

    def _unavailable(self, error: Exception) -> Unavailable:
        why = f"no answer within {TIMEOUT_S:g} s" if isinstance(error, TimeoutError) else str(error)
        return Unavailable(f"{self.name}: {why or type(error).__name__}")


def without_secrets(url: str) -> str:
    """For logs: scheme, host and port, or the socket's path."""
    parts = urlsplit(url)
    if parts.scheme == "unix":
        return f"unix://{parts.path}"
    port = f":{parts.port}" if parts.port else ""
    return f"{parts.scheme}://{parts.hostname or 'localhost'}{port}"
