"""`--check` says what a start would, without starting."""

from __future__ import annotations

import pytest

from core.errors import ConfigError
from core.settings import Settings
from services.check import check
from services.flags import PROCESSES, parse

WORKER = {"listen": "10.0.0.7:7000"}

BAD = [
    ("router", {}, "--discovery static://"),
    ("router", {"discovery": "zookeeper://x"}, "known: static://"),
    ("router", {"discovery": "dns://workers"}, "should be dns://name:port"),
    ("router", {"discovery": "dns://w:1", "ssl_certfile": "/absent.pem"}, "/absent.pem"),
    ("router", {"discovery": "dns://w:1", "api_keys": "alice"}, "NAME:KEY"),
    ("router", {"discovery": "dns://w:1", "cluster_tls_name": "x"}, "--cluster-tls-cert"),
    ("serve", {"discovery": "dns://w:1"}, "starts its own workers"),
    ("serve", {"api_keys": "alice"}, "NAME:KEY"),
    ("serve", {"tier_order": "host", "redis_url": "redis://x"}, "leaves out redis"),
    ("decode", {"listen": "0.0.0.0:7000"}, "--advertise"),
    ("decode", {"listen": "here"}, "is not host:port"),
    ("decode", WORKER | {"quantization": "int8", "device": "cuda"}, "int8"),
    ("decode", WORKER | {"device": "cuda", "transport": "shm"}, "use --transport nixl"),
    ("prefill", WORKER | {"cpu_affinity": "a-b"}, "is not a list of cores"),
    ("prefill", WORKER | {"transfer_hosts": "10.0.0.0/99"}, "10.0.0.0/99"),
    ("prefill", WORKER | {"discovery": "ftp://x"}, "known: static://"),
]  # fmt: skip


@pytest.mark.parametrize(("command", "values", "sentence"), BAD)
def test_refused(command: str, values: dict[str, object], sentence: str):
    with pytest.raises(ConfigError, match=r".") as caught:
        check(Settings.model_validate(values), command)
    assert sentence in str(caught.value)


@pytest.mark.parametrize(
    ("command", "values"),
    [
        ("router", {"discovery": "dns://workers:7000"}),
        ("router", {"discovery": "dns://workers:7000", "listen": "nonsense"}),
        ("serve", {"redis_url": "local://1GiB"}),
        ("decode", WORKER | {"model": "/not/there/yet", "device": "cuda"}),
        ("prefill", WORKER | {"redis_url": "redis://not-there-yet:6379"}),
    ],
)
def test_taken(command: str, values: dict[str, object]):
    check(Settings.model_validate(values), command)


def test_every_process_has_it():
    assert all(parse([command, "--check"])["check"] for command in PROCESSES)
    assert "check" not in parse(["serve"])
