"""What `baton serve` hands to its children, and what it hears from them."""

from __future__ import annotations

import subprocess
import sys
import time

import psutil
import pytest

from core.settings import Settings, load
from services.children import Child, child_environment, child_flags, secret_environment
from services.flags import make_parser


def as_child(command: str, flags: list[str], environ: dict[str, str]) -> Settings:
    """The settings that a child with these flags and this environment runs with."""
    given = vars(make_parser().parse_args([command, *flags]))
    given.pop("command")
    return load(given, environ, given.pop("config"))[0]


def test_flags_for_a_child_parse_back_to_the_same_settings() -> None:
    settings = Settings.model_validate(
        {
            "dtype": "bf16",
            "max_model_len": 512,
            "enable_prefix_caching": False,
            "lease_s": 0.5,
            "api_key": "secret",
            "redis_url": "redis://:secret@h",
        }
    )
    flags = child_flags(settings, port=9, discovery="static://a:1,b:2")
    assert not any("secret" in flag for flag in flags), "the process list is public"
    expected = {"port": 9, "discovery": "static://a:1,b:2", "api_key": "", "redis_url": ""}
    assert as_child("router", flags, {}) == settings.model_copy(update=expected)


def test_the_launchers_environment_decides_nothing_in_a_child() -> None:
    """A flag that says the default again beats the environment, in the children as in the launcher."""
    environ = {"BATON_BLOCK_SIZE": "32", "BATON_CONFIG": "/nowhere.toml", "PATH": "/bin"}
    settings, _ = load({"block_size": "16"}, {"BATON_BLOCK_SIZE": "32"})
    inherited = child_environment(environ)
    assert inherited == {"PATH": "/bin"}
    assert as_child("decode", child_flags(settings), inherited) == settings


def test_only_the_launchers_own_secrets_reach_a_child() -> None:
    assert child_environment({"BATON_API_KEY": "old"}) == {}
    settings = Settings.model_validate({"api_key": "new", "redis_url": "redis://:p@h"})
    secrets = secret_environment(settings)
    assert secrets == {"BATON_API_KEY": "new", "BATON_REDIS_URL": "redis://:p@h"}
    assert as_child("decode", child_flags(settings), secrets) == settings


def test_the_role_is_the_command() -> None:
    _, unknown = make_parser().parse_known_args(["decode", "--role", "prefill"])
    assert "--role" in unknown
    assert "role" not in Settings.model_fields


def test_last_words_are_kept_for_the_report(capsys: pytest.CaptureFixture[str]) -> None:
    child = Child("decode-0", ["decode", "--role=prefill"], "http://127.0.0.1:1/ready")
    for _ in range(2):
        child.start()
        deadline = time.monotonic() + 30
        while child.exit_status() is None and time.monotonic() < deadline:
            time.sleep(0.02)
        child.flush()
        assert child.exit_status() == 2
        assert child.last_words.startswith("--role is not a setting"), "in every life"
    assert capsys.readouterr().err == ""


def test_a_child_ends_with_its_launcher() -> None:
    """1. A launcher starts a router.  2. kill -9 of the launcher.  3. The router ends too."""
    script = (
        "import sys; from services.children import Child;"
        "c = Child('router', ['router', '--port=0', '--discovery=static://127.0.0.1:1'], 'http://127.0.0.1:1/');"
        "c.start(); print(c.pid, flush=True); sys.stdin.read()"
    )
    with subprocess.Popen([sys.executable, "-c", script], stdin=-1, stdout=-1, text=True) as launcher:
        assert launcher.stdin
        assert launcher.stdout
        child = psutil.Process(int(launcher.stdout.readline()))
        launcher.kill()
        launcher.stdin.close()
    child.wait(20)
    assert not child.is_running()
