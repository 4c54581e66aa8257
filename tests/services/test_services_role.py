"""`baton role` against a socket that answers like an admin port, like something else, or not at all."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from services import cli
from services.address import free_port


class AdminPort(HTTPServer):
    """Answers everything with `answer`; `asked`: path, key and body of each request."""

    def __init__(self) -> None:
        self.answer = 202, b'{"id": "p-0", "role": "prefill", "state": "draining"}'
        self.asked: list[tuple[str, str | None, bytes]] = []
        super().__init__(("127.0.0.1", 0), Handler)


class Handler(BaseHTTPRequestHandler):
    server: AdminPort

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        self.server.asked.append((self.path, self.headers.get("Authorization"), body))
        status, answer = self.server.answer
        self.send_response(status)
        self.send_header("Content-Length", str(len(answer)))
        self.end_headers()
        self.wfile.write(answer)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture(autouse=True)
def unconfigured_log(monkeypatch: pytest.MonkeyPatch) -> None:
    """Later tests would log to this one's captured stderr, which is closed by then."""
    monkeypatch.setattr("core.log.configure", lambda *args, **bound: None)


@pytest.fixture
def port() -> Iterator[AdminPort]:
    with AdminPort() as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def test_it_asks_the_admin_port(port: AdminPort, capsys, monkeypatch):
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
def test_a_refusal_is_a_sentence(port: AdminPort, capsys, answer: tuple[int, bytes], words: str):
    port.answer = answer
    assert cli.main(["role", "p-0", "decode", "--router", f"http://127.0.0.1:{port.server_port}/"]) == 1
    out, err = capsys.readouterr()
    assert (out, err[:7]) == ("", "baton: ")
    assert words in err


def test_nobody_there_and_nowhere_to_ask(capsys):
    assert cli.main(["role", "p-0", "decode", f"--router=http://127.0.0.1:{free_port('127.0.0.1')}"]) == 1
    assert "no router answers at http://127.0.0.1:" in capsys.readouterr().err
    assert cli.main(["role", "p-0", "decode"]) == 2
    assert "where is the router's admin port?" in capsys.readouterr().err
