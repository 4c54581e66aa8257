"""Certificates from PEM files: tried out before anything is served, read again when they are replaced.

A certificate of the cluster is shown both by who calls and by who answers. So it needs both uses
(`serverAuth` and `clientAuth`, or no extended key usage at all), a signature of the cluster's CA, and as
subject alternative names the hosts that processes are reached at (IP addresses as such), or one name that
all share, which is then given as the name to expect.
"""

from __future__ import annotations

import os
import ssl
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import grpc

from core import log
from core.errors import ConfigError

_log = log.get("wire")

T = TypeVar("T")

_HANDSHAKE_TURNS = 8
"""More than either side ever waits for the other."""


def server_context(cert: str, key: str, ca: str, flags: Sequence[str]) -> ssl.SSLContext:
    """For a server that shows `cert`; with `ca` it asks clients for a certificate, and whoever has none is to
    be refused later. An empty `key` means that it lies in `cert`. `flags`: what errors call the three.

    Raises ConfigError for files that cannot be read or do not belong together.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    _load(context, cert, key, flags)
    if ca:
        _trust(context, ca, flags[2])
        context.verify_mode = ssl.CERT_OPTIONAL
    return context


class ClusterTLS:
    """What one process shows to the others and whom it believes: always mutual.

    `name`: what their certificates must be made out to, in place of the host in their address; empty = that
    host. Raises ConfigError for files that cannot be read, do not belong together, or that no peer with the
    same CA would accept.
    """

    _FLAGS = ("--cluster-tls-cert", "--cluster-tls-key", "--cluster-tls-ca")

    def __init__(self, cert: str, key: str, ca: str, name: str = "") -> None:
        missing = [flag for flag, path in zip(self._FLAGS, (cert, key, ca), strict=True) if not path]
        if missing:
            raise ConfigError(f"TLS between workers needs {', '.join(missing)} too")
        self.name = name
        self._paths = (cert, key, ca)
        self._files = PemFiles(self._paths, self._FLAGS)
        self._pem = self._read()

    def channel_credentials(self) -> grpc.ChannelCredentials:
        """Of the files as they are now; a channel of gRPC's keeps what it was made with."""
        cert, key, ca = self.newest()
        return grpc.ssl_channel_credentials(ca, key, cert)

    def server_credentials(self) -> grpc.ServerCredentials:
        """Each new connection is met with the files as they are then."""
        latest = self.newest()

        def changed() -> Any:
            """None = nothing new. Called on a thread of gRPC's, before the handshake of each connection."""
            nonlocal latest
            before, latest = latest, self.newest()
            return None if latest == before else _configuration(*latest)

        return grpc.dynamic_ssl_server_credentials(_configuration(*latest), changed, True)

    def newest(self) -> tuple[bytes, bytes, bytes]:
        """Certificate, key and CA as the files hold them, or held them while a replacement is incomplete."""
        self._pem = self._files.renewed(self._read) or self._pem
        return self._pem

    def _read(self) -> tuple[bytes, bytes, bytes]:
        cert, key, ca = self._paths
        server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        client = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        client.check_hostname = False
        for context in (server, client):
            _load(context, cert, key, self._FLAGS)
            _trust(context, ca, self._FLAGS[2])
            context.verify_mode = ssl.CERT_REQUIRED
        try:
            _shake_hands(client, server)
        except ssl.SSLError as error:
            why = getattr(error, "verify_message", "") or error.reason or "the handshake fails"
            raise ConfigError(
                f"no peer would accept --cluster-tls-cert {cert} ({why}); it needs a signature of the CA in "
                f"{ca}, to be valid today, and to be meant for servers and clients alike"
            ) from None
        return Path(cert).read_bytes(), Path(key).read_bytes(), Path(ca).read_bytes()


class PemFiles:
    """Certificate, key and CA as they were found; empty paths are none. Raises ConfigError."""

    def __init__(self, paths: Sequence[str], flags: Sequence[str]) -> None:
        self._paths, self._flags = paths, flags
        self._stamps = self._stamp()
        self._trouble = ""

    def renewed(self, read: Callable[[], T]) -> T | None:
        """What `read` makes of files that were replaced since; None where none was, or where they do not
        belong together yet, which is logged once: the next call tries again."""
        try:
            found = self._stamp()
            if found == self._stamps:
                return None
            made = read()
        except (ConfigError, OSError) as error:
            if str(error) != self._trouble:
                self._trouble = str(error)
                _log.warning("tls.not_reloaded", reason=self._trouble)
            return None
        self._stamps, self._trouble = found, ""
        _log.info("tls.reloaded", cert=self._paths[0])
        return made

    def _stamp(self) -> list[tuple[int, int]]:
        found = []
        for path, flag in zip(self._paths, self._flags, strict=True):
            if path:
                try:
                    stat = os.stat(path)
                except OSError as error:
                    raise _unreadable(flag, path, error) from None
                found.append((stat.st_ino, stat.st_mtime_ns))
        return found


def _configuration(cert: bytes, key: bytes, ca: bytes) -> grpc.ServerCertificateConfiguration:
    return grpc.ssl_server_certificate_configuration([(key, cert)], ca)


def _load(context: ssl.SSLContext, cert: str, key: str, flags: Sequence[str]) -> None:
    _require_readable(cert, flags[0])
    if key:
        _require_readable(key, flags[1])
    try:
        context.load_cert_chain(cert, key or None, password="")  # no password: it would ask the terminal
    except ssl.SSLError as error:
        if error.reason == "KEY_VALUES_MISMATCH":
            raise ConfigError(f"{flags[1]} {key or cert} is not the key of {flags[0]} {cert}") from None
        raise ConfigError(
            f"{flags[0]} {cert} and {flags[1]} {key or cert} hold no certificate and key in PEM, "
            f"or the key is encrypted; give them as plain PEM"
        ) from None


def _trust(context: ssl.SSLContext, ca: str, flag: str) -> None:
    _require_readable(ca, flag)
    try:
        context.load_verify_locations(ca)
    except ssl.SSLError:
        raise ConfigError(f"{flag} {ca} holds no certificate in PEM") from None


def _require_readable(path: str, flag: str) -> None:
    try:
        Path(path).read_bytes()
    except OSError as error:
        raise _unreadable(flag, path, error) from None


def _unreadable(flag: str, path: str, error: OSError) -> ConfigError:
    return ConfigError(f"{flag} {path} cannot be read: {error.strerror}")


def _shake_hands(client: ssl.SSLContext, server: ssl.SSLContext) -> None:
    """Both verify each other, in memory. Raises ssl.SSLError."""
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    sides = (client.wrap_bio(to_client, to_server), server.wrap_bio(to_server, to_client, server_side=True))
    for _ in range(_HANDSHAKE_TURNS):
        for side in sides:
            try:
                side.do_handshake()
            except ssl.SSLWantReadError:
                pass
