"""A socket that answers HTTP with what it was given, for commands that ask a router."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer

Answer = tuple[int, bytes]
"""Status and body; of a 302 the body is where it leads."""


class AnsweringServer(HTTPServer):
    """`answers` by path, `otherwise` for the rest; `asked`: path, key and body of each request."""

    def __init__(self, otherwise: Answer) -> None:
        self.otherwise = otherwise
        self.answers: dict[str, Answer] = {}
        self.asked: list[tuple[str, str | None, bytes]] = []
        super().__init__(("127.0.0.1", 0), _Handler)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class _Handler(BaseHTTPRequestHandler):
    server: AnsweringServer

    def do_GET(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        self.server.asked.append((self.path, self.headers.get("Authorization"), body))
        status, answer = self.server.answers.get(self.path, self.server.otherwise)
        self.send_response(status)
        if status == 302:
            self.send_header("Location", answer.decode())
        self.send_header("Content-Length", str(len(answer)))
        self.end_headers()
        self.wfile.write(answer)

    do_POST = do_GET

    def log_message(self, *_: object) -> None:
        pass


@contextmanager
def answering(otherwise: Answer) -> Iterator[AnsweringServer]:
    with AnsweringServer(otherwise) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield server
        server.shutdown()
        thread.join()
