"""What the NetworkPolicies count on and Baton does not decide: where NIXL listens."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec

import pytest

# Not imported here: its libraries read how much they log only once, and the process is shared.
pytestmark = pytest.mark.skipif(find_spec("nixl") is None, reason="NIXL is not installed")

_LISTENERS = """
import psutil
from nixl._api import nixl_agent, nixl_agent_config
agent = nixl_agent("ports", nixl_agent_config(backends=["UCX"]))
found = psutil.Process().net_connections()
print("ports", *(each.laddr.port for each in found if each.status == psutil.CONN_LISTEN))
"""


def test_nixl_listens_within_the_range_that_it_is_given(rendered: dict[str, str]):
    given = "7100-7199"
    assert f"value: {given}" in rendered["cpu + networkpolicy"]
    assert "endPort: 7199" in rendered["cpu + networkpolicy"]
    done = subprocess.run(
        [sys.executable, "-c", _LISTENERS],
        env=os.environ | {"UCX_TCP_PORT_RANGE": given, "UCX_TLS": "tcp"},
        capture_output=True, text=True, timeout=60, check=True,
    )  # fmt: skip
    line = next(line for line in done.stdout.splitlines() if line.startswith("ports"))
    ports = list(map(int, line.split()[1:]))
    assert ports
    assert all(7100 <= port <= 7199 for port in ports)
