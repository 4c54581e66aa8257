"""Child processes of `baton serve`: started, probed, ended."""

from __future__ import annotations

import json
import os
import signal
import ssl
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections import deque
from collections.abc import Mapping
from http.client import HTTPException

from core.settings import ENV_PREFIX, SECRETS, Settings
from services import orphan

_UNVERIFIED = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
"""A child's certificate is made out to the name that clients use, not to the address we reach it at."""
_UNVERIFIED.check_hostname = False
_UNVERIFIED.verify_mode = ssl.CERT_NONE

SENTENCE = "baton: "
"""How a line begins that says, to a person, why a process gives up."""


def child_flags(settings: Settings, **own: object) -> list[str]:
    """Command-line flags that give a child these settings with its own values on top.

    Defaults are left out, so they hold only with `child_environment`. So are SECRETS, which would show in
    the process list.
    """
    given = {
        name: value
        for name, value in settings.model_dump().items()
        if value != Settings.model_fields[name].default and name not in SECRETS
    } | own
    flags = []
    for name, value in given.items():
        flag = name.replace("_", "-")
        if isinstance(value, bool):
            flags.append(f"--{flag}" if value else f"--no-{flag}")
        elif value is not None:
            flags.append(f"--{flag}={value}")
    return flags


def secret_environment(settings: Settings) -> dict[str, str]:
    """What `child_flags` leaves out of these settings, as environment variables."""
    values = {name: getattr(settings, name) for name in SECRETS}
    return {f"{ENV_PREFIX}{name.upper()}": value for name, value in values.items() if value}


def child_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """`environ` without its settings, so that a child's own alone decide."""
    return {name: value for name, value in environ.items() if not name.startswith(ENV_PREFIX)}


class Child:
    """One process and its readiness probe.

    Its log is passed on line by line. The sentence with which it gives up is kept as `last_words`,
    for whoever reports its end.
    """

    def __init__(
        self,
        name: str,
        arguments: list[str],
        probe_url: str,
        address: str = "",
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self.name, self.address = name, address
        self._environment = dict(environment or {})
        self.given_up = self.ready = False
        self.last_words = ""
        self.body: dict[str, object] = {}
        self._arguments, self._probe_url = arguments, probe_url
        self._process: subprocess.Popen[str] | None = None
        self._starts: deque[float] = deque(maxlen=64)
        self._forwarder: threading.Thread | None = None

    @property
    def pid(self) -> int:
        return self._process.pid if self._process else 0

    def start(self) -> None:
        self.ready, self.last_words, self.body = False, "", {}
        self._starts.append(time.monotonic())
        self._process = subprocess.Popen(
            [sys.executable, "-m", "services.cli", *self._arguments],
            stdin=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            start_new_session=True,
            env=child_environment(os.environ) | self._environment | {orphan.PARENT: str(os.getpid())},
        )
        self._forwarder = threading.Thread(target=self._forward, args=(self._process,), daemon=True)
        self._forwarder.start()

    def restarts_within(self, seconds: float) -> int:
        return sum(at > time.monotonic() - seconds for at in list(self._starts)[1:])

    def exit_status(self) -> int | None:
        return self._process.poll() if self._process else None

    def probe(self) -> dict[str, object]:
        """The body of the readiness probe ({} when it does not answer); sets `ready`."""
        try:
            with urllib.request.urlopen(self._probe_url, timeout=1.0, context=_UNVERIFIED) as reply:
                self.ready, self.body = True, json.load(reply)
        except urllib.error.HTTPError as error:
            self.ready = False
            try:
                self.body = json.load(error)
            except ValueError:
                self.body = {}
        except (OSError, ValueError, HTTPException):  # the last: another program has taken the port
            self.ready = False
        return self.body

    def kill(self) -> None:
        self.send(signal.SIGKILL)

    def wait(self, timeout_s: float) -> None:
        """Wait for the end; SIGKILL when it does not come in time."""
        if self._process is None:
            return
        try:
            self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self.kill()
            self._process.wait(5.0)
        self.flush()

    def flush(self) -> None:
        """Let the last lines of a process that ended come through, `last_words` among them."""
        if self._forwarder:
            self._forwarder.join(1.0)

    def send(self, number: signal.Signals) -> None:
        """Send it, unless the process has ended."""
        if self._process and self._process.poll() is None:
            self._process.send_signal(number)

    def _forward(self, process: subprocess.Popen[str]) -> None:
        assert process.stderr
        for line in process.stderr:
            if line.startswith(SENTENCE):
                self.last_words = line.removeprefix(SENTENCE).rstrip()
            else:
                sys.stderr.write(line)
                sys.stderr.flush()
