"""Values of a load on their way from Redis into its buffers, verified as they arrive.

loop                                   threads, one node's part of a load each
read(wanted) ------------------------> connection of redis-py: connected, authenticated, TLS
  waits, at most `limit_s`             GETEX, a few ahead  ->  Replies  ->  wanted.into
  gives up: the connection is cut  ->  ends
"""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from redis.connection import ConnectionPool

from kvtransfer.payload import HEADER_NBYTES, check
from kvtransfer.redis_client import RedisClient
from kvtransfer.redis_replies import Refusal, Replies
from kvtransfer.threads import DaemonThreads

THREADS = 4
"""Two loads at once (`RedisTier`), or one from several nodes of a cluster."""

_AHEAD = 4
"""Values asked for before the first of them is there, so that the server is never idle. Few, since a server
keeps what it could not send yet."""

_CUT_S = 1.0
"""For a thread to notice that its connection was cut."""


@dataclass(slots=True)
class Wanted:
    """One block's value. `outcome`: None when `into` holds the verified payload, else `missing`, `refused`,
    `abandoned`, or what is wrong with the value, as `payload.check` says; also `length` and `type`."""

    key: str
    block_hash: bytes
    into: memoryview
    outcome: str | None = "abandoned"


HARMLESS = (None, "missing", "refused", "abandoned")
"""Outcomes that do not mean a damaged value."""


class RedisValues:
    """`expiry`: arguments of GETEX. `stall_s` bounds every silence of a server."""

    def __init__(self, client: RedisClient, namespace: bytes, expiry: Sequence[str], stall_s: float) -> None:
        self._client, self._namespace, self._expiry = client, namespace, expiry
        self._stall_s = stall_s
        self._threads = DaemonThreads(THREADS, "redis-tier")

    async def read(self, wanted: Sequence[Wanted], limit_s: float) -> None:
        """Set their outcomes; of each node's part, nothing is asked for any more after a first that failed.

        Raises one of FAULTS, TimeoutError after `limit_s`. Once it returned or raised, nothing is written.
        """
        readings = await self._readings(wanted)
        jobs = [asyncio.wrap_future(self._threads.submit(reading.run)) for reading in readings]
        for job in jobs:
            job.add_done_callback(lambda job: job.cancelled() or job.exception())  # maybe nobody else looks
        try:
            _, late = await asyncio.wait(jobs, timeout=limit_s)
        finally:
            cut = [job for job, reading in zip(jobs, readings, strict=True) if reading.abandon()]
            if cut:
                await asyncio.wait(cut, timeout=_CUT_S)
            errors = [job.exception() for job in jobs if job.done()]
        if late:
            raise TimeoutError(f"the values did not come within {limit_s:g} s")
        if error := next(filter(None, errors), None):
            raise error

    async def _readings(self, wanted: Sequence[Wanted]) -> list[_Reading]:
        parts: dict[ConnectionPool, list[Wanted]] = {}
        pools = await self._client.pools([each.key for each in wanted], self._stall_s)
        for pool, each in zip(pools, wanted, strict=True):
            parts.setdefault(pool, []).append(each)
        return [_Reading(pool, part, self._namespace, self._expiry) for pool, part in parts.items()]

    def close(self) -> None:
        """Idempotent."""
        self._threads.close()


class _Reading:
    """What one node has of a load."""

    def __init__(
        self, pool: ConnectionPool, wanted: Sequence[Wanted], namespace: bytes, expiry: Sequence[str]
    ) -> None:
        self._pool, self._wanted, self._namespace, self._expiry = pool, wanted, namespace, expiry
        self._header = memoryview(bytearray(HEADER_NBYTES))
        self._lock = threading.Lock()
        self._socket: socket.socket | None = None
        self._abandoned = False

    def run(self) -> None:
        connection = self._pool.get_connection()
        try:
            if self._begin(connection):
                self._read(connection)
        except BaseException:
            connection.disconnect()  # it is in the middle of a reply
            raise
        finally:
            with self._lock:
                self._socket = None
            self._pool.release(connection)

    def abandon(self) -> bool:
        """From any thread: cut the connection. Whether there was one; if not, nothing is read any more."""
        with self._lock:
            self._abandoned = True
            if self._socket is None:
                return False
            with suppress(OSError):  # the peer has closed it
                socket.socket.shutdown(self._socket, socket.SHUT_RDWR)  # below TLS, which would wait
            return True

    def _begin(self, connection: Any) -> bool:
        with self._lock:
            if not self._abandoned:
                self._socket = connection._sock  # as redis-py's own parsers take it
            return not self._abandoned

    def _read(self, connection: Any) -> None:
        assert self._socket
        replies, wanted, asked, failed = Replies(self._socket), self._wanted, 0, False
        for i, each in enumerate(wanted):
            if not failed and asked < len(wanted) and asked - i <= _AHEAD // 2:
                commands = [("GETEX", ahead.key, *self._expiry) for ahead in wanted[asked : i + _AHEAD]]
                connection.send_packed_command(connection.pack_commands(commands), check_health=False)
                asked += len(commands)
            if i == asked:
                return
            each.outcome = self._take(replies, each)
            failed = failed or each.outcome is not None

    def _take(self, replies: Replies, each: Wanted) -> str | None:
        said = replies.next()
        if said is None:
            return "missing"
        if isinstance(said, Refusal):
            return "type" if said.message.startswith("WRONGTYPE") else "refused"
        if said != HEADER_NBYTES + len(each.into):
            replies.skip(said)
            replies.end()
            return "length"
        replies.fill(self._header)
        replies.fill(each.into)
        replies.end()
        return check(self._header, self._namespace, each.block_hash, each.into)
