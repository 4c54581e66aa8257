"""`baton role` against a socket that answers like an admin port, like something else, or not at all."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from answering_server import AnsweringServer, answering

from services import cli
from services.address import free_port


@pytest.fixture(autouse=True)
def unconfigured_log(monkeypatch: pytest.MonkeyPatch) -> None:
    """Later tests would log to this one's captured stderr, which is closed by then."""
    monkeypatch.setattr("core.log.configure", lambda *args, **bound: None)


@pytest.fixture
def port() -> Iterator[AnsweringServer]:
    with answering((202, b'{"id": "p-0", "role": "prefill", "state": "draining"}')) as server:
        yield server


def test_it_asks_the_admin_port(port: AnsweringServer, capsys, monkeypatch):
    monkeypatch.setenv("BATON_API_KEY", "secret")
    assert cli.main(["role", "p/0", "decode", f"--admin-port={port.server_port}"]) == 0
    assert port.asked == [("/v1/cluster/workers/p%2F0/role", "Bearer secret", b'{"role":"decode"}')]
    assert capsys.readouterr().out == "p-0 is a prefill worker, draining\n"


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        ((409, b'{"error": {"message": "p-0 is the last one"}}'), "409: p-0 is the last one"),
        ((404, b"<html>"), "is the URL right?"),
        ((200, b"[]"), "is it an admin port?"),
        ((200, b"hello"), "is it an admin port?"),
    ],
)
def test_a_refusal_is_a_sentence(port: AnsweringServer, capsys, answer: tuple[int, bytes], words: str):
    port.otherwise = answer
    assert cli.main(["role", "p-0", "decode", "--router", f"{port.url}/"]) == 1
    out, err = capsys.readouterr()
    assert (out, err[:7]) == ("", "baton: ")
    assert words in err


def test_nobody_there_and_nowhere_to_ask(capsys):
    assert cli.main(["role", "p-0", "decode", f"--router=http://127.0.0.1:{free_port('127.0.0.1')}"]) == 1
    assert "no router answers at http://127.0.0.1:" in capsys.readouterr().err
    assert cli.main(["role", "p-0", "decode"]) == 2
    assert "where is the router's admin port?" in capsys.readouterr().err
