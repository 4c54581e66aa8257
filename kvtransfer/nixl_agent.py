"""How NIXL's agents are made and kept at work."""

from __future__ import annotations

import importlib
from typing import Any

from core.log import get

DRIVE_S = 5e-3
"""Pause between looks of an agent without a thread of its own: what a peer's first message waits."""

_PROGRESS_DELAY_US = 10_000  # longest sleep of NIXL's own thread; a message from a peer wakes it

log = get("kvtransfer")


def new_agent(api: Any, name: str, *, own_thread: bool) -> Any:
    """An agent with UCX whose progress thread (`own_thread`) sleeps until something happens.

    The wrapper's own agent has a delay of 0, with which that thread spins on a core of its own even
    while idle; so the agent inside is replaced by one with a delay, before UCX is started.

    With blocks on a GPU that thread must not be: no CUDA context is current on it, and UCX's CUDA transports
    crash the process there (reported as ai-dynamo/nixl pull request 2103). Without it, call `drive` often,
    on a thread that has the context.
    """
    bindings = importlib.import_module("nixl._bindings")
    config = bindings.nixlAgentConfig()
    config.useProgThread = own_thread
    config.useListenThread = False
    config.pthrDelay = _PROGRESS_DELAY_US
    config.syncMode = bindings.NIXL_THREAD_SYNC_NONE
    agent = api.nixl_agent(name, api.nixl_agent_config(enable_prog_thread=False, backends=[]))
    agent.agent = bindings.nixlAgent(name, config)
    agent.create_backend("UCX")
    return agent


def drive(agent: Any) -> None:
    """Let an agent without a thread answer its peers. Errors are logged: reads find them again."""
    try:
        agent.get_new_notifs()
    except Exception as error:
        log.debug("nixl.drive_failed", error=f"{type(error).__name__}: {error}")
