"""Who may talk to whom: mutual TLS and the cluster token over real connections."""

from __future__ import annotations

import os
import re
import socket
import ssl
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_health.v1._async import HealthServicer
from made_certificates import Authority

from core.errors import ConfigError
from core.settings import Settings
from wire import certificates, channel, token
from wire.certificates import ClusterTLS
from wire.channel import Identity
from wire.v1 import generation_pb2 as gen
from wire.v1 import generation_pb2_grpc as gen_grpc
from wire.v1 import prefill_pb2 as pb
from wire.v1 import prefill_pb2_grpc as pb_grpc

TOKEN = "a-token-of-enough-characters"
OTHER = "another-token-of-enough-characters"


class Service(pb_grpc.PrefillServicer, gen_grpc.DecodeServicer):
    """Answers one call of each kind that there is."""

    shown_by_caller = ""

    async def Renew(self, request, context):
        Service.shown_by_caller = b"".join(context.auth_context().get("x509_pem_cert", ())).decode()
        return pb.RenewReply(lease_s=1.5)

    async def Run(self, request, context):
        yield pb.RunEvent(accepted=pb.Accepted(lease_s=2.5))

    async def Session(self, request_iterator, context):
        async for message in request_iterator:
            yield gen.SessionReply(failures=[gen.Failure(request_id=message.start.request_id)])


@asynccontextmanager
async def serving(identity: Identity, refused: Callable[[], None] = lambda: None) -> AsyncIterator[str]:
    server = channel.server(identity, refused)
    pb_grpc.add_PrefillServicer_to_server(Service(), server)
    gen_grpc.add_DecodeServicer_to_server(Service(), server)
    checks = HealthServicer()
    await checks.set("", health_pb2.HealthCheckResponse.SERVING)
    health_pb2_grpc.add_HealthServicer_to_server(checks, server)
    port = channel.listen(server, "127.0.0.1:0", identity)
    await server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        await server.stop(0)


async def call_all(address: str, identity: Identity) -> None:
    """One call of each kind; raises what refuses the first."""
    async with channel.connect(address, identity) as opened:
        stub = pb_grpc.PrefillStub(opened)
        assert (await stub.Renew(pb.RenewRequest(), timeout=5)).lease_s == 1.5
        assert [event.accepted.lease_s async for event in stub.Run(pb.RunRequest(), timeout=5)] == [2.5]
        session = gen_grpc.DecodeStub(opened).Session(timeout=5)
        await session.write(gen.SessionRequest(start=gen.Start(request_id="r")))
        assert (await session.read()).failures[0].request_id == "r"
        await session.done_writing()


def without_certificate(authority: Authority) -> grpc.ChannelCredentials:
    return grpc.ssl_channel_credentials(Path(authority.path).read_bytes())


def shown(address: str, authority: Authority) -> bytes:
    """The server's certificate (DER) as a new connection sees it."""
    host, port = address.split(":")
    context = ssl.create_default_context(cafile=authority.path)
    context.set_alpn_protocols(["h2"])
    context.load_cert_chain(*authority.issue("probe"))
    with (
        socket.create_connection((host, int(port)), 5) as plain,
        context.wrap_socket(plain, server_hostname=host) as secured,
    ):
        return secured.getpeercert(binary_form=True) or b""


def join_files(path: str, *parts: str) -> None:
    Path(path).write_bytes(b"".join(Path(part).read_bytes() for part in parts))


def der(path: str) -> bytes:
    return ssl.PEM_cert_to_DER_cert(Path(path).read_text())


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path / "ours")


def identity_of(authority: Authority, *names: str, stem: str = "a", name: str = "", **more: str) -> Identity:
    return Identity(tls=ClusterTLS(*authority.issue(stem, *names), authority.path, name), **more)


async def test_who_shows_a_certificate_of_the_ca_is_let_in(authority: Authority) -> None:
    async with serving(identity_of(authority, stem="server")) as address:
        await call_all(address, identity_of(authority, stem="client"))


async def test_who_shows_none_or_anothers_is_not(authority: Authority, tmp_path: Path) -> None:
    """Nor does a client believe a server with a certificate of another CA."""
    foreign = identity_of(Authority(tmp_path / "theirs"))
    ours = identity_of(authority)
    async with serving(ours) as address:
        for identity in (Identity(), foreign):
            with pytest.raises(grpc.aio.AioRpcError):
                await call_all(address, identity)
        async with grpc.aio.secure_channel(address, without_certificate(authority)) as opened:
            with pytest.raises(grpc.aio.AioRpcError):
                await pb_grpc.PrefillStub(opened).Renew(pb.RenewRequest(), timeout=5)
        await call_all(address, ours)


async def test_the_certificate_must_name_the_host_or_the_name_agreed_on(authority: Authority) -> None:
    named = identity_of(authority, "baton-worker", stem="named")
    async with serving(named) as address:
        with pytest.raises(grpc.aio.AioRpcError):
            await call_all(address, named)
        shared = identity_of(authority, "baton-worker", stem="named", name="baton-worker")
        await call_all(address, shared)


async def test_a_replaced_certificate_meets_new_connections(authority: Authority) -> None:
    """1. A server runs, a client is connected.  2. The files are replaced, the key a moment after the certificate.
    3. The old connection goes on; before the key is there new ones see the old certificate, then the new one."""
    cert, key = authority.issue("server")
    server = Identity(tls=ClusterTLS(cert, key, authority.path))
    client = identity_of(authority, stem="client")

    async with serving(server) as address, channel.connect(address, client) as before:
        stub = pb_grpc.PrefillStub(before)
        await stub.Renew(pb.RenewRequest(), timeout=5)
        first = shown(address, authority)
        assert first == der(cert)
        newer_cert, newer_key = authority.issue("newer")
        os.replace(newer_cert, cert)
        assert shown(address, authority) == first
        os.replace(newer_key, key)
        assert shown(address, authority) == der(cert) != first
        await stub.Renew(pb.RenewRequest(), timeout=5)
        await call_all(address, client)


async def test_a_replaced_certificate_is_shown_by_callers_too(tmp_path: Path) -> None:
    """1. A call runs.  2. The caller's files are replaced by those of another CA, which the server trusts too.
    3. The next call over the same channel shows the new certificate; the one that runs goes on."""
    first, second = Authority(tmp_path / "first"), Authority(tmp_path / "second")
    both = str(tmp_path / "both.pem")
    join_files(both, first.path, second.path)
    cert, key = first.issue("client")
    client = Identity(TOKEN, ClusterTLS(cert, key, both))
    server = Identity(TOKEN, ClusterTLS(*first.issue("server"), both))
    async with serving(server) as address, channel.connect(address, client) as opened:
        session = gen_grpc.DecodeStub(opened).Session()
        stub = pb_grpc.PrefillStub(opened)
        for authority in (first, second):
            certificate, private = authority.issue("client")
            os.replace(certificate, cert)
            os.replace(private, key)
            await stub.Renew(pb.RenewRequest(), timeout=5)
            assert ssl.PEM_cert_to_DER_cert(Service.shown_by_caller) == der(cert)
            await session.write(gen.SessionRequest(start=gen.Start(request_id="r")))
            assert (await session.read()).failures[0].request_id == "r"
        session.cancel()


@pytest.mark.parametrize("shown", ["", OTHER, TOKEN[:-1], TOKEN + "x"])
async def test_a_call_without_the_token_is_refused(shown: str, capsys: pytest.CaptureFixture[str]) -> None:
    """It is counted, its reason says what to do, nobody learns the token by it, and the log is not flooded."""
    refused: list[None] = []
    async with serving(Identity(TOKEN), lambda: refused.append(None)) as address:
        for attempt in range(5):
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await call_all(address, Identity(shown))
            assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED
            assert caught.value.details() == token.REFUSAL
            assert len(refused) == attempt + 1
        await call_all(address, Identity(TOKEN))
    output = capsys.readouterr()
    assert (output.out + output.err).count("peer.refused") == 1
    for text in (output.out, output.err, repr(Identity(TOKEN))):
        assert TOKEN not in text
        assert not shown or shown not in text


async def test_a_stream_that_sends_nothing_is_refused_too() -> None:
    async with serving(Identity(TOKEN)) as address, channel.connect(address) as opened:
        call = gen_grpc.DecodeStub(opened).Session(timeout=5)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call.read()
    assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED


async def test_health_checks_need_no_token() -> None:
    async with serving(Identity(TOKEN)) as address, channel.connect(address) as opened:
        stub = health_pb2_grpc.HealthStub(opened)
        reply = await stub.Check(health_pb2.HealthCheckRequest(), timeout=5)
        assert reply.status == health_pb2.HealthCheckResponse.SERVING
        with pytest.raises(grpc.aio.AioRpcError):
            await stub.Watch(health_pb2.HealthCheckRequest(), timeout=5).read()


async def test_both_at_once(authority: Authority) -> None:
    async with serving(identity_of(authority, token=TOKEN)) as address:
        await call_all(address, identity_of(authority, stem="b", token=TOKEN))
        with pytest.raises(grpc.aio.AioRpcError, match="cluster token"):
            await call_all(address, identity_of(authority, stem="b"))


async def test_metadata_without_end_is_refused() -> None:
    async with serving(Identity(TOKEN)) as address, channel.connect(address) as opened:
        for size in (channel.MAX_METADATA_NBYTES + 1, 10 * channel.MAX_METADATA_NBYTES):
            call = opened.unary_unary("/baton.wire.v1.Prefill/Renew")
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await call(b"", timeout=5, metadata=(("x-much", "y" * size),))
            assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    async with serving(Identity(TOKEN)) as address:
        await call_all(address, Identity(TOKEN))


@pytest.mark.parametrize("address", ["unix:8", "ipv4:8", "dns:8"])
async def test_an_address_is_a_host_and_a_port_whatever_it_looks_like(address: str) -> None:
    async with channel.connect(address) as opened:
        with pytest.raises(grpc.aio.AioRpcError, match=r"(?i)dns|resol"):
            await pb_grpc.PrefillStub(opened).Renew(pb.RenewRequest(), timeout=5)


# ---- settings that cannot work


def cluster(cert: str = "", key: str = "", ca: str = "", **more: str) -> Settings:
    return Settings(cluster_tls_cert=cert, cluster_tls_key=key, cluster_tls_ca=ca, **more)  # type: ignore[arg-type]


def test_what_cannot_work_is_said_before_anything_is_served(authority: Authority, tmp_path: Path) -> None:
    cert, key = authority.issue("a")
    other_cert, other_key = authority.issue("b")
    foreign_ca = Authority(tmp_path / "theirs").path
    rubbish = tmp_path / "rubbish.pem"
    rubbish.write_text("no PEM")
    cases = [
        (cluster(cert, key), "needs --cluster-tls-ca too"),
        (cluster(ca=authority.path), "needs --cluster-tls-cert, --cluster-tls-key too"),
        (cluster(cluster_tls_name="n"), "--cluster-tls-name needs"),
        (cluster("/no/where.pem", key, authority.path), "--cluster-tls-cert /no/where.pem cannot be read: No such"),
        (cluster(cert, str(tmp_path), authority.path), f"--cluster-tls-key {tmp_path} cannot be read: Is a dir"),
        (cluster(cert, other_key, authority.path), f"{other_key} is not the key of --cluster-tls-cert {cert}"),
        (cluster(str(rubbish), key, authority.path), "hold no certificate and key in PEM"),
        (cluster(cert, key, str(rubbish)), f"--cluster-tls-ca {rubbish} holds no certificate"),
        (cluster(cert, key, foreign_ca), "no peer would accept"),
        (cluster(*authority.issue("old", expired=True), authority.path), "certificate has expired"),
        (Settings(cluster_token="short"), "16 printable"),
        (Settings(cluster_token="spaces make it no token"), "no space"),
        (Settings(cluster_token="ünïcödé-is-not-carried"), "ASCII"),
    ]  # fmt: skip
    for settings, words in cases:
        with pytest.raises(ConfigError, match=re.escape(words)) as caught:
            Identity.of(settings)
        assert not settings.cluster_token or settings.cluster_token not in caught.value.message
    both = Identity.of(cluster(other_cert, other_key, authority.path, cluster_token=TOKEN))
    assert (both.token, both.weakness()) == (TOKEN, "")
    assert "in the clear" in Identity.of(Settings(cluster_token=TOKEN)).weakness()
    assert "BATON_CLUSTER_TOKEN" in Identity.of(Settings()).weakness()


def test_the_files_of_https_are_tried_out_too(authority: Authority, tmp_path: Path) -> None:
    flags = ("--ssl-certfile", "--ssl-keyfile", "--ssl-ca-certs")
    cert, key = authority.issue("a")
    _, other_key = authority.issue("b")
    together = tmp_path / "together.pem"
    together.write_bytes(Path(cert).read_bytes() + Path(key).read_bytes())
    assert certificates.server_context(str(together), "", "", flags).verify_mode is ssl.CERT_NONE
    assert certificates.server_context(cert, key, authority.path, flags).verify_mode is ssl.CERT_OPTIONAL
    for files, words in (
        ((cert, other_key, ""), f"--ssl-keyfile {other_key} is not the key of --ssl-certfile {cert}"),
        ((cert, "", ""), "hold no certificate and key"),
        (("/no/where", "", ""), "--ssl-certfile /no/where cannot be read"),
        ((cert, key, "/no/ca"), "--ssl-ca-certs /no/ca cannot be read"),
    ):
        with pytest.raises(ConfigError, match=re.escape(words)):
            certificates.server_context(*files, flags)
