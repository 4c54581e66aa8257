"""The router's connections: bounds on the head of a request, HTTPS, client certificates."""

from __future__ import annotations

import asyncio
import contextlib
import os
import ssl
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from made_certificates import Authority

from core.errors import ConfigError
from core.settings import Settings
from services.router import connection, main
from services.router.app import create_app
from services.router.https import HTTPS
from services.router.router import Router

LIMIT = 4096


def serving(settings: Settings, https: HTTPS | None = None) -> AbstractAsyncContextManager[int]:
    """A router without workers; yields its port."""
    return serving_app(create_app(Router(settings)), https or HTTPS(settings))


@asynccontextmanager
async def serving_app(app: Any, https: HTTPS | None = None) -> AsyncIterator[int]:
    server = main._make_server(app, https or HTTPS(Settings(max_header_bytes=LIMIT)))
    with main.listen("127.0.0.1", 0) as listener:
        task = asyncio.create_task(server._serve([listener]))
        try:
            yield listener.getsockname()[1]
        finally:
            server.should_exit = server.force_exit = True
            await task


async def exchange(port: int, *parts: bytes) -> bytes:
    """Send the parts one after another; what came back until the server closed the connection."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    async with asyncio.timeout(10):
        for part in parts:
            writer.write(part)
            await writer.drain()
            await asyncio.sleep(0.01)
        answer = await reader.read()
    writer.close()
    return answer


async def sent_until_cut(port: int, start: bytes, more: bytes) -> int:
    """Send `more` again and again; how often until the server closed the connection."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(start)
    reading, times = asyncio.create_task(reader.read()), 0
    async with asyncio.timeout(10):
        while not reading.done():
            writer.write(more)
            times += 1
            await asyncio.sleep(0.01)
    with contextlib.suppress(ConnectionError):
        await reading
    writer.close()
    return times


def head(*fields: bytes, path: bytes = b"/health") -> bytes:
    return b"\r\n".join([b"GET %s HTTP/1.1" % path, b"host: x", b"connection: close", *fields, b"", b""])


async def test_a_head_within_its_bound_is_read_and_one_above_is_refused() -> None:
    async with serving(Settings(max_header_bytes=LIMIT)) as port:
        assert (await exchange(port, head(b"x: " + b"y" * (LIMIT - 300)))).startswith(b"HTTP/1.1 200")
        for request in (
            head(b"x: " + b"y" * LIMIT),
            head(*[b"x-%d: y" % i for i in range(LIMIT // 8)]),
            head(path=b"/health?" + b"y" * LIMIT),
        ):
            answer = await exchange(port, request)
            assert answer.startswith(b"HTTP/1.1 431")
            assert b'"code":"headers_too_large"' in answer


async def test_a_head_without_end_is_cut() -> None:
    """It is never complete, so nobody could answer it: neither one field that grows, nor ever more of them."""
    async with serving(Settings(max_header_bytes=LIMIT)) as port:
        for start, more in (
            (b"GET / HTTP/1.1\r\nx: ", b"y" * 1000),
            (b"GET / HTTP/1.1\r\n", b"x: y\r\n" * 170),
        ):
            answer = await exchange(port, start, *[more] * 5)
            assert answer.startswith(b"HTTP/1.1 431")
        assert (await exchange(port, b"GET /" + b"y" * 1000, *[b"y" * 1000] * 5)).startswith(b"HTTP/1.1 431")


async def test_bodies_and_further_requests_do_not_count_as_head() -> None:
    async with serving(Settings(max_header_bytes=LIMIT)) as port:
        post = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % (10 * LIMIT)
        answer = await exchange(port, post, *[b"z" * LIMIT] * 10, head())
        assert answer.startswith(b"HTTP/1.1 503")  # no model yet
        assert b'{"status":"alive"}' in answer
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}") as client:
            for _ in range(8):
                reply = await client.get("/health", headers={"x": "y" * (LIMIT // 2)})
                assert reply.status_code == 200


async def test_a_head_that_does_not_come_ends_the_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "REST_TIMEOUT_S", 0.2)
    async with serving(Settings()) as port:
        assert await exchange(port, b"GET / HTTP/1.1\r\n", b"x: y\r\n") == b""
        assert await exchange(port) == b""


async def test_trailers_are_bounded_and_are_no_headers() -> None:
    """After a request that is being read, and after one that was refused: many of them, one that grows, and a
    chunk's extension."""
    chunked = b"POST %s HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n2\r\n{}\r\n"
    async with serving(Settings(max_header_bytes=LIMIT, api_key="k" * 16)) as port:
        for path in (b"/v1/completions", b"/health"):
            for start, more in (
                (b"0\r\n", b"x: y\r\n" * 170),
                (b"0\r\nx: ", b"y" * 1000),
                (b"2;x=", b"y" * 1000),
            ):
                assert await sent_until_cut(port, chunked % path + start, more) < 500
        answer = await exchange(port, chunked % b"/health" + b"0\r\nx: y\r\n\r\n", head())
        assert answer.count(b"HTTP/1.1") == 2


async def test_a_trailer_does_not_pass_for_a_header() -> None:
    seen: list[list[tuple[bytes, bytes]]] = []

    async def app(scope, receive, send) -> None:
        while (await receive()).get("more_body"):
            pass
        seen.append(list(scope["headers"]))
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"0")]})
        await send({"type": "http.response.body", "body": b""})

    async with serving_app(app) as port:
        start = b"POST / HTTP/1.1\r\nhost: x\r\nconnection: close\r\ntransfer-encoding: chunked\r\n\r\n0\r\n"
        await exchange(port, start, b"x-baton-plan: local\r\n\r\n")
    assert [name for name, _ in seen[0]] == [b"host", b"connection", b"transfer-encoding"]


async def test_the_rest_of_a_request_that_was_answered_early_has_its_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A byte now and then keeps no connection."""
    monkeypatch.setattr(connection, "REST_TIMEOUT_S", 0.3)
    post = b"POST %s HTTP/1.1\r\nhost: x\r\ncontent-length: 1000000\r\n\r\n"
    async with serving(Settings(api_key="k" * 16)) as port:
        for path in (b"/v1/completions", b"/nowhere", b"/health"):
            assert await sent_until_cut(port, post % path, b"x") > 3


async def test_what_comes_during_an_answer_does_not_cut_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """1. A stray line end after the body, which some clients send.  2. The beginning of a further request."""
    monkeypatch.setattr(connection, "REST_TIMEOUT_S", 0.1)

    async def app(scope, receive, send) -> None:
        while (await receive()).get("more_body"):
            pass
        await send({"type": "http.response.start", "status": 200, "headers": []})
        for _ in range(8):
            await send({"type": "http.response.body", "body": b"x", "more_body": True})
            await asyncio.sleep(0.05)
        await send({"type": "http.response.body", "body": b"END"})

    async with serving_app(app) as port:
        post = b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 2\r\n\r\n{}"
        for extra in (b"\r\n", b"GET / HT"):
            answer = await exchange(port, post, extra)
            assert b"END" in answer


# ---- TLS


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path / "servers")


def client_context(authority: Authority, *certificate: str) -> ssl.SSLContext:
    context = ssl.create_default_context(cafile=authority.path)
    if certificate:
        context.load_cert_chain(*certificate)
    return context


async def get(port: int, context: ssl.SSLContext, path: str) -> httpx.Response:
    async with httpx.AsyncClient(base_url=f"https://127.0.0.1:{port}", verify=context) as client:
        return await client.get(path)


async def test_https(authority: Authority, tmp_path: Path) -> None:
    cert, key = authority.issue("a")
    async with serving(Settings(ssl_certfile=cert, ssl_keyfile=key)) as port:
        assert (await get(port, client_context(authority), "/health")).json() == {"status": "alive"}
        assert (await get(port, client_context(authority), "/version")).status_code == 200
        for refused in (ssl.create_default_context(), client_context(Authority(tmp_path / "others"))):
            with pytest.raises(httpx.ConnectError, match="CERTIFICATE_VERIFY_FAILED"):
                await get(port, refused, "/health")
        assert b"HTTP/1.1 200" not in await exchange(port, head())


async def test_clients_with_a_certificate_are_served_and_others_find_probes_alone(
    authority: Authority, tmp_path: Path
) -> None:
    """A certificate of another CA does not even get that far."""
    cert, key = authority.issue("a")
    clients, strangers = Authority(tmp_path / "clients"), Authority(tmp_path / "strangers")
    settings = Settings(ssl_certfile=cert, ssl_keyfile=key, ssl_ca_certs=clients.path, api_key="k" * 16)
    async with serving(settings) as port:
        known = client_context(authority, *clients.issue("c", "somebody.example"))
        assert (await get(port, known, "/version")).status_code == 401  # the key is wanted all the same
        nobody = client_context(authority)
        assert (await get(port, nobody, "/health")).status_code == 200
        assert (await get(port, nobody, "/ready")).status_code == 503
        for path in (
            "/version",
            "/metrics",
            "/v1/models",
            "/nowhere",
            "/health/../metrics",
            "//metrics",
            "/Health",
        ):
            reply = await get(port, nobody, path)
            assert (reply.status_code, reply.json()["error"]["code"]) == (403, "client_certificate_required")
        with pytest.raises(httpx.HTTPError):
            await get(port, client_context(authority, *strangers.issue("s", "somebody.example")), "/health")


async def test_a_replaced_certificate_meets_new_connections(authority: Authority) -> None:
    """While key and certificate do not belong together, the old ones stay."""
    cert, key = authority.issue("a")
    settings = Settings(ssl_certfile=cert, ssl_keyfile=key)
    https = HTTPS(settings)

    async def shown(port: int) -> str:
        _, writer = await asyncio.open_connection("127.0.0.1", port, ssl=client_context(authority))
        certificate = writer.get_extra_info("ssl_object").getpeercert()
        writer.close()
        return certificate["serialNumber"]

    async with serving(settings, https) as port:
        first = await shown(port)
        new_cert, new_key = authority.issue("b")
        os.replace(new_cert, cert)
        https.refresh()
        assert await shown(port) == first
        os.replace(new_key, key)
        https.refresh()
        second = await shown(port)
        assert second != first
        os.remove(cert)
        https.refresh()
        assert await shown(port) == second


def test_files_that_cannot_work_are_said_at_start(authority: Authority) -> None:
    cert, key = authority.issue("a")
    for settings, words in (
        (Settings(ssl_keyfile=key), "--ssl-keyfile without --ssl-certfile"),
        (Settings(ssl_keyfile=key, ssl_ca_certs=cert), "--ssl-keyfile and --ssl-ca-certs without"),
        (Settings(ssl_certfile="/no/where"), "/no/where cannot be read"),
        (Settings(ssl_certfile=cert, ssl_keyfile=authority.path), "hold no certificate and key"),
        (Settings(cluster_token="short"), "openssl rand"),
        (Settings(cluster_tls_cert=cert), "--cluster-tls-key, --cluster-tls-ca too"),
    ):
        workers = settings.model_copy(update={"port": 0, "discovery": "static://127.0.0.1:9"})
        with pytest.raises(ConfigError, match=words):
            main.run(workers)
