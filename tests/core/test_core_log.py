"""Log lines on stderr: an exception is written once, without a complaint of the logging library."""

from __future__ import annotations

import json
import threading
import warnings

import pytest
import structlog

from core import log


@pytest.fixture(autouse=True)
def unconfigured():
    yield
    structlog.reset_defaults()
    log._bound.clear()


def logged(form: str, capsys: pytest.CaptureFixture[str]) -> str:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        log.configure("info", form, worker="w")
        log.get("test").error("it.failed", exc_info=ValueError("a reason"))
    return capsys.readouterr().err


def test_an_exception_on_a_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    assert logged("console", capsys).count("a reason") == 1


def test_an_exception_in_json(capsys: pytest.CaptureFixture[str]) -> None:
    line = json.loads(logged("json", capsys))
    assert (line["event"], line["worker"]) == ("it.failed", "w")
    assert line["exception"].endswith("ValueError: a reason")


CANARY = "canary-in-a-local-variable"


def fails_beside_a_secret() -> None:
    prompt = CANARY  # noqa: F841
    raise ValueError("a reason")


@pytest.mark.parametrize("form", ["console", "json"])
def test_no_local_variable_is_written(form: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Neither with the exception as a value nor as the one that is being handled, nor of what caused it."""
    log.configure("debug", form)
    try:
        try:
            fails_beside_a_secret()
        except ValueError as error:
            secret = CANARY  # noqa: F841
            log.get("test").error("it.failed", exc_info=error)
            raise RuntimeError("because of that") from error
    except RuntimeError:
        log.get("test").exception("it.failed.again")
    written = capsys.readouterr().err
    assert written.count("fails_beside_a_secret") >= 2
    assert written.count("a reason") >= 2
    assert written.count(CANARY) == 0


def test_every_thread_says_whose_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    log.configure("info", "json", process="decode")
    log.configure("info", "json", worker="w")
    thread = threading.Thread(target=log.get("test").info, args=("it.happened",))
    thread.start()
    thread.join()
    line = json.loads(capsys.readouterr().err)
    assert (line["process"], line["worker"]) == ("decode", "w")
