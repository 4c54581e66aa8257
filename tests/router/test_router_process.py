"""The router as a process: it starts light, says where it listens, ends when told."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request

import pytest

from core.errors import ConfigError
from core.settings import Settings
from services.router import main
from services.router.https import HTTPS
from services.router.router import Router

RUN = (
    "import sys; from services.cli import main;"
    "status = main(['router', '--port=0', '--discovery=static://127.0.0.1:9', '--drain-timeout-s=1']);"
    "assert not {'torch', 'numpy', 'nixl'} & sys.modules.keys(), 'heavy';"
    "assert not any(name.split('.')[0] in ('engine', 'kvtransfer') for name in sys.modules), 'rooms';"
    "sys.exit(status)"
)


def test_the_application_imports_in_under_a_second_and_without_torch():
    code = (
        "import sys, time; began = time.process_time(); import services.router.app;"
        "took = time.process_time() - began;"  # CPU time: the machine may be busy with other tests
        "assert not {'torch', 'numpy', 'engine', 'kvtransfer'} & sys.modules.keys(); print(took)"
    )
    seconds = [float(subprocess.check_output([sys.executable, "-c", code])) for _ in range(3)]
    assert min(seconds) < 1.0


def test_a_process_listens_answers_and_stops():
    """1. The router says its port.  2. /health answers while the model loads.  3. /ready says what is
    missing.  4. /metrics has no `_created` series.  5. SIGTERM: it exits with 0, having loaded nothing
    heavy."""
    process = subprocess.Popen([sys.executable, "-c", RUN], stderr=subprocess.PIPE, text=True, env=os.environ)
    try:
        assert process.stderr is not None
        listening = json.loads(process.stderr.readline())
        assert listening["event"] == "router.listening"
        url = f"http://127.0.0.1:{listening['port']}"
        assert json.load(urllib.request.urlopen(f"{url}/health", timeout=5)) == {"status": "alive"}
        deadline = time.monotonic() + 20
        problems: list[str] = []
        while not any("127.0.0.1:9" in problem for problem in problems) and time.monotonic() < deadline:
            with pytest.raises(urllib.error.HTTPError) as caught:
                urllib.request.urlopen(f"{url}/ready", timeout=5)
            problems = json.load(caught.value)["problems"]
            time.sleep(0.05)
        assert problems[0] == "no decode worker is ready"
        metrics = urllib.request.urlopen(f"{url}/metrics", timeout=5).read()
        assert b"baton_requests_total{" in metrics
        assert b"_created" not in metrics
        process.send_signal(signal.SIGTERM)
        assert process.wait(10) == 0, process.stderr.read()
    finally:
        process.kill()
        process.communicate()


def test_settings_that_cannot_work_are_sentences():
    workers = "static://127.0.0.1:9"
    cases = [
        (Settings(port=0, discovery="carrier-pigeon://x"), "known: static://"),
        (Settings(port=0, discovery=workers, model="/nowhere.gguf"), "/nowhere.gguf"),
        (Settings(port=0, discovery=workers, host="203.0.113.7"), "cannot listen on 203.0.113.7"),
    ]
    for settings, words in cases:
        with pytest.raises(ConfigError, match=words):
            main.run(settings)


async def test_an_admin_port_that_fails_ends_the_router(monkeypatch):
    """1. The admin server dies while the other one serves.  2. That one is told.  3. The failure is raised."""

    class Dying:
        async def serve(self, sockets: object) -> None:
            raise OSError("planted")

    monkeypatch.setattr(main, "_make_server", lambda app, https: Dying())
    router, told = Router(Settings()), asyncio.Event()

    async def serve(listener: socket.socket) -> None:
        async with main._serve_admins(router, listener, HTTPS(router.settings), lambda task: told.set()):
            await asyncio.wait_for(told.wait(), 5)

    with main.listen("127.0.0.1", 0) as listener, pytest.raises(OSError, match="planted"):
        await serve(listener)
