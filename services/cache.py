"""`baton cache ls|stat|verify|clear`: what lies on disk and in Redis, without a worker.

    --disk-cache-dir DIR    a worker's directory, or one above several, as `baton serve` lays them out
    --redis-url URL         asked with SCAN and short pipelines, so that workers may go on using it

Exit status 0; 1 when damaged entries are left or a cache could not be had; 2 when the command has to change.
"""

from __future__ import annotations

import os
import re
import shutil
import sys
import time
from asyncio import Runner
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from redis.exceptions import ResponseError

from core.errors import ConfigError, Unavailable
from core.settings import Settings
from kvtransfer.disk_walk import LOCK, damage, holder, lock, walk
from kvtransfer.payload import HEADER_NBYTES, check_named
from kvtransfer.redis_client import FAULTS, Command, RedisClient

REDIS_TIMEOUT_S = 10.0
"""For one answer of a server."""

AT_ONCE = 500
VALUES_NBYTES = 8 * 2**20
"""Of one pipeline, keys or bytes of values: a server answers others in between."""

PREFIX = "baton:kv:"
_KEY = re.compile(r"baton:kv:([0-9a-f]{16}):([0-9a-f]{64})")


@dataclass(frozen=True, slots=True)
class Entry:
    """One block. `age_s`: seconds since its last use on disk, until it expires in Redis."""

    namespace: str
    nbytes: int
    age_s: float


class Cache(Protocol):
    """One cache while it is open. Everything raises OSError or, for Redis, one of its FAULTS."""

    name: str
    age: str
    """What an entry's age is."""

    def names(self) -> Iterator[list[str]]:
        """All entries, `AT_ONCE` together; those listed already may be deleted meanwhile."""
        ...

    def entries(self, names: Sequence[str]) -> Iterator[Entry]:
        """Of those that are whole blocks by their name, and still there."""
        ...

    def check(self, names: Sequence[str]) -> Iterator[tuple[str, str]]:
        """(name, what is wrong with it or "") of those that are still there."""
        ...

    def delete(self, names: Sequence[str]) -> None: ...

    def facts(self) -> dict[str, str]:
        """What is worth knowing beside the blocks."""
        ...


class DiskCache:
    """A directory whose lock we have."""

    age = "last used"

    def __init__(self, directory: Path) -> None:
        self.name, self._directory = str(directory), directory

    def names(self) -> Iterator[list[str]]:
        every = [path for path, _ in walk(self._directory, set())]
        yield from (every[first : first + AT_ONCE] for first in range(0, len(every), AT_ONCE))

    def entries(self, names: Sequence[str]) -> Iterator[Entry]:
        now = time.time()
        for name in names:
            if not name.endswith(".tmp"):
                stat = (self._directory / name).stat()
                yield Entry(name.partition("/")[0], stat.st_size, max(0.0, now - stat.st_mtime))

    def check(self, names: Sequence[str]) -> Iterator[tuple[str, str]]:
        return ((name, damage(self._directory, name) or "") for name in names)

    def delete(self, names: Sequence[str]) -> None:
        for name in names:
            (self._directory / name).unlink(missing_ok=True)
        for directory in {os.path.dirname(name) for name in names}:
            with suppress(OSError):  # others are in there
                os.removedirs(self._directory / directory)

    def facts(self) -> dict[str, str]:
        incomplete = sum(path.endswith(".tmp") for path, _ in walk(self._directory, set()))
        free = shutil.disk_usage(self._directory).free
        return {"incomplete files": str(incomplete), "free on its file system": _size(free)}


class RedisCache:
    """A server or a cluster, which workers may use meanwhile."""

    age = "expires in"

    def __init__(self, client: RedisClient, runner: Runner) -> None:
        self.name, self._client, self._runner = client.address, client, runner

    def names(self) -> Iterator[list[str]]:
        keys = aiter(self._client.keys(PREFIX, REDIS_TIMEOUT_S))

        async def some() -> list[str]:
            batch: list[str] = []
            async for key in keys:
                batch.append(key.decode(errors="replace"))
                if len(batch) == AT_ONCE:
                    break
            return batch

        while batch := self._runner.run(some()):
            yield [key for key in batch if _KEY.fullmatch(key)]

    def entries(self, names: Sequence[str]) -> Iterator[Entry]:
        replies = self._run([(command, key) for command in ("STRLEN", "PTTL") for key in names])
        for key, nbytes, life_ms in zip(names, replies, replies[len(names) :], strict=False):
            if isinstance(nbytes, int) and nbytes:
                yield Entry(key[len(PREFIX) :][:16], nbytes, max(0, life_ms) / 1000)

    def check(self, names: Sequence[str]) -> Iterator[tuple[str, str]]:
        batch: list[str] = []
        nbytes = 0
        for key, length in zip(names, self._run([("STRLEN", key) for key in names]), strict=True):
            if isinstance(length, ResponseError):
                yield key, "type"
                continue
            batch, nbytes = [*batch, key], nbytes + length
            if nbytes >= VALUES_NBYTES:
                yield from self._checked(batch)
                batch, nbytes = [], 0
        yield from self._checked(batch)

    def delete(self, names: Sequence[str]) -> None:
        for reply in self._run([("UNLINK", name) for name in names]):
            if isinstance(reply, ResponseError):
                raise reply

    def facts(self) -> dict[str, str]:
        said = {} if self._client.is_cluster else self._run([("INFO", "all")])[0]
        if not isinstance(said, dict) or not said:
            return {}
        cap = said["maxmemory"]
        return {
            "server's memory": f"{_size(said['used_memory'])} of {_size(cap) if cap else 'all there is'}",
            "maxmemory-policy": said["maxmemory_policy"],
            "keys evicted": str(said["evicted_keys"]),
        }

    def _checked(self, keys: Sequence[str]) -> Iterator[tuple[str, str]]:
        for key, value in zip(keys, self._run([("GET", key) for key in keys]), strict=True):
            named = _KEY.fullmatch(key)
            if isinstance(value, bytes) and named:  # else it expired meanwhile
                namespace, block_hash = map(bytes.fromhex, named.groups())
                payload = memoryview(value)[HEADER_NBYTES:]
                yield key, check_named(value[:HEADER_NBYTES], namespace, block_hash, payload) or ""

    def _run(self, commands: Sequence[Command]) -> list[Any]:
        return self._runner.run(self._client.run(commands, REDIS_TIMEOUT_S)) if commands else []


def run(settings: Settings, action: str, *, delete: bool = False, yes: bool = False) -> int:
    """`ls`, `stat`, `verify` or `clear` for every cache that the settings name; returns the exit status.

    Raises ConfigError: no cache named, none there, a URL that cannot be read, `clear` without `yes`.
    """
    if not settings.disk_cache_dir and not settings.redis_url:
        raise ConfigError("which cache? Name it with --disk-cache-dir DIR, --redis-url URL or both")
    if action == "clear" and not yes:
        raise ConfigError("clear deletes every block of every model in there; say --yes when that is meant")
    do: Callable[[Cache], bool] = {
        "ls": _ls,
        "stat": _stat,
        "verify": lambda cache: _verify(cache, delete),
        "clear": _clear,
    }[action]
    caches = [_disk(directory) for directory in _directories(settings.disk_cache_dir)]
    caches += [_redis(settings.redis_url)] if settings.redis_url else []
    well = True
    for opening in caches:
        try:
            with opening as cache:
                print(cache.name)
                well &= do(cache)
        except Unavailable as error:
            print(f"baton: {error.message}", file=sys.stderr)
            well = False
    return 0 if well else 1


def _ls(cache: Cache) -> bool:
    groups: dict[str, list[float]] = {}  # blocks, bytes, least age, greatest age
    for names in cache.names():
        for entry in cache.entries(names):
            group = groups.setdefault(entry.namespace, [0, 0, entry.age_s, entry.age_s])
            group[0] += 1
            group[1] += entry.nbytes
            group[2:] = min(group[2], entry.age_s), max(group[3], entry.age_s)
    print(f"  {'namespace':16}  {'blocks':>9}  {'bytes':>10}  {cache.age}" if groups else "  no blocks")
    for namespace, (blocks, nbytes, least_s, most_s) in sorted(groups.items()):
        ages = f"{_duration(least_s)} to {_duration(most_s)}"
        print(f"  {namespace}  {int(blocks):9,}  {_size(nbytes):>10}  {ages}")
    return True


def _stat(cache: Cache) -> bool:
    every = [entry for names in cache.names() for entry in cache.entries(names)]
    facts = {
        "namespaces": f"{len({entry.namespace for entry in every}):,}",
        "blocks": f"{len(every):,}",
        "bytes": _size(sum(entry.nbytes for entry in every)),
        **cache.facts(),
    }
    for name, value in facts.items():
        print(f"  {name:24} {value}")
    return True


def _verify(cache: Cache, delete: bool) -> bool:
    checked = damaged = 0
    for names in cache.names():
        bad = []
        for name, mismatch in cache.check(names):
            checked += 1
            if mismatch:
                bad.append(name)
                print(f"  {name}  {mismatch}")
        damaged += len(bad)
        if delete:
            cache.delete(bad)
    print(f"  {checked:,} checked, {damaged:,} damaged{' and deleted' if delete and damaged else ''}")
    return delete or not damaged


def _clear(cache: Cache) -> bool:
    deleted = 0
    for names in cache.names():
        cache.delete(names)
        deleted += len(names)
    print(f"  {deleted:,} deleted")
    return True


def _directories(setting: str) -> list[Path]:
    """The directory itself, or those of several workers right below it. Raises ConfigError for none."""
    if not setting:
        return []
    directory = Path(setting).expanduser()
    found = [lock_.parent for pattern in (LOCK, f"*/{LOCK}") for lock_ in sorted(directory.glob(pattern))]
    if not found:
        raise ConfigError(
            f"there is no cache in {directory}: no worker has had it as its --disk-cache-dir; name another"
        )
    return found


@contextmanager
def _disk(directory: Path) -> Iterator[Cache]:
    """Raises Unavailable for a cache that is in use, or a disk that does not work."""
    try:
        fd = lock(directory)
    except BlockingIOError:
        pid = holder(directory)
        who = f"process {pid}" if pid else "another process"
        raise Unavailable(f"{directory} is in use by {who}; stop that worker and try again") from None
    except OSError as error:
        raise Unavailable(f"{directory} cannot be locked: {error.strerror}; is it yours?") from None
    try:
        yield DiskCache(directory)
    except OSError as error:
        raise Unavailable(f"{error.filename or directory}: {error.strerror}; the rest was not done") from None
    finally:
        os.close(fd)


@contextmanager
def _redis(url: str) -> Iterator[Cache]:
    """Raises ConfigError for the URL, Unavailable for a server that does not answer."""
    with Runner() as runner:
        client = RedisClient(url)
        try:
            yield RedisCache(client, runner)
        except FAULTS as error:
            why = str(error) or f"no answer within {REDIS_TIMEOUT_S:g} s"
            raise Unavailable(f"Redis at {client.address} cannot be asked: {why}") from None
        finally:
            runner.run(client.close(REDIS_TIMEOUT_S))


def _size(nbytes: float) -> str:
    units = ["B", "KiB", "MiB", "GiB", "TiB"]
    while nbytes >= 1024 and len(units) > 1:
        nbytes, units = nbytes / 1024, units[1:]
    return f"{nbytes:.1f} {units[0]}" if units[0] != "B" else f"{nbytes:.0f} B"


def _duration(seconds: float) -> str:
    for unit, length_s in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= length_s:
            return f"{seconds / length_s:.0f} {unit}"
    return f"{seconds:.0f} s"
