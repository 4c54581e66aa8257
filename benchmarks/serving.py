"""`baton serve` in a process of its own, for a benchmark that is its client."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

import httpx

from services.address import free_port

END_S = 30.0
"""How long the server may take to end when it is asked to."""


@contextmanager
def served(*flags: str, deadline: float) -> Iterator[str]:
    """The URL of a server with these flags, all workers ready; ended with the block.

    Raises SystemExit when it ends, or is not ready by `deadline`, in `time.monotonic()`.
    """
    port = free_port("127.0.0.1")
    command = [sys.executable, "-m", "services.cli", "serve", f"--port={port}", "--log-level=warning", *flags]
    process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
    try:
        url = f"http://127.0.0.1:{port}"
        while not _is_ready(url):
            if process.poll() is not None:
                raise SystemExit(f"baton serve ended with status {process.returncode}; its reason is above")
            if time.monotonic() > deadline:
                raise SystemExit("baton serve did not become ready in time; see its log above")
            time.sleep(0.2)
        yield url
    finally:
        end(process)


def end(process: subprocess.Popen[bytes]) -> None:
    """Kindly, then by force."""
    process.terminate()
    try:
        process.wait(END_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait(END_S)


def _is_ready(url: str) -> bool:
    try:
        reply = httpx.get(f"{url}/ready", timeout=2)
    except httpx.TransportError:
        return False
    states = [worker["state"] for worker in reply.json().get("workers", [])]
    return reply.status_code == 200 and bool(states) and all(state == "ready" for state in states)
