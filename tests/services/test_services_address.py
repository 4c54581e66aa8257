"""Addresses: read, listened on, told to peers, and refused in a sentence that says why."""

from __future__ import annotations

import socket

import pytest

from core.errors import ConfigError
from services import address


@pytest.mark.parametrize(
    ("text", "host", "port"),
    [("127.0.0.1:80", "127.0.0.1", 80), ("node-3:0", "node-3", 0), ("[::1]:65535", "::1", 65535)],
)
def test_reading_and_writing_are_inverse(text: str, host: str, port: int) -> None:
    assert address.split(text, "--listen") == (host, port)
    assert address.join(host, port) == text


@pytest.mark.parametrize("text", ["", "host", ":80", "host:", "host:x", "host:65536", "::1:80", "host:²"])
def test_what_is_no_address(text: str) -> None:
    with pytest.raises(ConfigError, match="is not host:port"):
        address.split(text, "--listen")


def test_a_port_in_use_blames_the_port() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=f"127.0.0.1:{port}: Address already in use; .* --port"):
            address.bind("127.0.0.1", port)


@pytest.mark.parametrize("host", ["no-such-host.invalid", "192.0.2.1", "a..b", "[::1]"])
def test_a_wrong_host_blames_the_host(host: str) -> None:
    with pytest.raises(ConfigError, match="choose another --host") as caught:
        address.bind(host, 0)
    assert "in use" not in caught.value.message
    assert "Unknown error" not in caught.value.message


def test_ipv6() -> None:
    with address.bind("::1", 0) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=rf"\[::1\]:{port}: Address already in use"):
            address.bind("::1", port)


@pytest.mark.parametrize(
    ("listen", "advertise", "told"),
    [
        ("127.0.0.1:7000", "", "127.0.0.1:7000"),
        ("0.0.0.0:7000", "node-3:7000", "node-3:7000"),
        ("[::]:7000", "[fd00::3]:7000", "[fd00::3]:7000"),
    ],
)
def test_what_peers_are_told(listen: str, advertise: str, told: str) -> None:
    assert address.announced(listen, advertise) == told


@pytest.mark.parametrize(
    ("listen", "advertise"),
    [
        ("0.0.0.0:7000", ""),
        ("[::]:7000", ""),
        ("127.0.0.1:1", "0.0.0.0:7000"),
        ("127.0.0.1:1", "node-3:0"),
        ("127.0.0.1:1", "node-3"),
    ],
)
def test_peers_are_told_nothing_useless(listen: str, advertise: str) -> None:
    with pytest.raises(ConfigError, match="--advertise"):
        address.announced(listen, advertise)


@pytest.mark.parametrize(
    ("host", "from_here"),
    [("0.0.0.0", "127.0.0.1"), ("::", "::1"), ("::1", "::1"), ("node-3", "node-3"), ("10.0.0.1", "10.0.0.1")],
)
def test_where_this_machine_reaches_it(host: str, from_here: str) -> None:
    assert address.reachable(host) == from_here


@pytest.mark.parametrize(
    ("host", "here"),
    [("localhost", True), ("127.8.0.1", True), ("::1", True), ("0.0.0.0", False), ("node-3", False)],
)
def test_hosts_that_only_this_machine_reaches(host: str, here: bool) -> None:
    assert address.is_loopback(host) is here
