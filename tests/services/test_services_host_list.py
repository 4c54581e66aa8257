"""Which hosts a decode worker connects to."""

from __future__ import annotations

import pytest

from core.errors import ConfigError, PeerLost
from services.host_list import HostList, require_same_host


@pytest.mark.parametrize(
    ("listed", "host", "allowed"),
    [
        ("", "203.0.113.9", True),
        ("127.0.0.1", "127.0.0.1", True),
        ("127.0.0.1", "localhost", True),
        ("127.0.0.1", "127.0.0.2", False),
        ("10.0.0.0/8,127.0.0.0/8", "127.9.9.9", True),
        ("10.0.0.0/8", "127.0.0.1", False),
        ("10.0.0.0/8", "::ffff:10.1.2.3", True),
        ("10.0.0.0/8", "::ffff:11.1.2.3", False),
        ("[2001:db8::]/32", "2001:db8::7", True),
        ("2001:db8::/32", "2001:db9::7", False),
        ("Prefill.Internal", "prefill.internal", True),
        ("prefill.internal", "localhost", False),
        ("10.1.2.3/8", "10.200.0.1", True),
        ("127.0.0.1", "2130706433", True),
        ("10.0.0.0/8", "2130706433", False),
        ("10.0.0.0/8", "169.254.169.254", False),
        ("10.0.0.0/8", "no-such-host.invalid", False),
        ("10.0.0.0/8", "a\x00b", False),
        ("10.0.0.0/8", "x" * 300, False),
    ],
)
def test_a_host_is_listed_or_not(listed: str, host: str, allowed: bool) -> None:
    hosts = HostList.parse(listed)
    if allowed:
        hosts.check(host)
        return
    with pytest.raises(PeerLost, match=r"not among --transfer-hosts|cannot be found"):
        hosts.check(host)


@pytest.mark.parametrize("listed", ["10.0.0.0/40", "a/b", "host:80", "two words", "1.2.3.4/x"])
def test_what_is_no_host_is_refused_at_start(listed: str) -> None:
    with pytest.raises(ConfigError, match="--transfer-hosts: "):
        HostList.parse(f"127.0.0.1,{listed}")


@pytest.mark.parametrize("listed", [" ", ",", " , ", "[]"])
def test_a_list_of_nobody_does_not_let_everybody_in(listed: str) -> None:
    with pytest.raises(ConfigError, match="--transfer-hosts has no host in it"):
        HostList.parse(listed)


def test_a_peer_sends_nobody_elsewhere() -> None:
    require_same_host("localhost", "127.0.0.1")
    with pytest.raises(PeerLost, match="another host"):
        require_same_host("169.254.169.254", "127.0.0.1")
