"""The redis-server that `baton serve` starts for itself."""

from __future__ import annotations

import pytest
import redis

from core.errors import ConfigError
from services.local_redis import local_redis


def test_it_holds_what_was_asked_for_and_ends_with_the_block() -> None:
    with local_redis("local://64MiB") as url:
        client = redis.Redis.from_url(url)
        assert client.config_get("maxmemory")["maxmemory"] == str(64 * 2**20)
        assert client.config_get("maxmemory-policy")["maxmemory-policy"] == "allkeys-lru"
        assert client.set("a", b"b")
    with pytest.raises(redis.ConnectionError):
        client.ping()


@pytest.mark.parametrize("url", ["local://little", "local://12"])
def test_a_size_that_is_none_is_refused(url: str) -> None:
    with pytest.raises(ConfigError, match="at least 1MiB"), local_redis(url):
        pass
